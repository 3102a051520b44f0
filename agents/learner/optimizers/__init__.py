"""Optimisers of one flat tensor of weights: Adam, AdamW, RAdam and Muon."""
