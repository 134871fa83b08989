"""Pairs that make_pairs.py draws with the demo's model, beside true edits."""
