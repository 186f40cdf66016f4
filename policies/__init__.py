"""The shipped policies, as package data."""
