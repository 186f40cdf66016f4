"""Per-op decisions on a region: the table that a policy becomes, the modes that carry it out, the record they share."""
