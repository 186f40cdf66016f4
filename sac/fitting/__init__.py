"""A budget in the config: the first step is observed, and a plan that fits the budget is used from the second."""
