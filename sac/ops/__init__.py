"""Names and properties of ops: which overloads a policy matches, and which of them can be saved or recomputed."""
