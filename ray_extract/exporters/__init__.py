"""Committed states in the formats of trainers. Needs torch, neither ray nor sglang nor a trainer."""
