"""Names and facts of ops: which overloads a policy means, and what each of them may and may not have done to it."""
