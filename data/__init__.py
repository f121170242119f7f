"""Rows: schema, prompts and snapshots. schema.py and prompts.py need the standard library only."""
