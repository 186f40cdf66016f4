"""Runnable examples, and configs of models for the command line (`--model hf:llama-3.2-1b`), as package data."""
