"""What a region keeps and how it is recomputed: decision table, tape, recorder, replay, rerun, whole modules."""
