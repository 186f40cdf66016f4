"""A Python module whose attribute a region's code names; see test_exact_when_programs_change.py."""

factor = 1.0
count = 0


def counted() -> int:
    global count
    count += 1
    return count
