"""Losses that are fused with the logits, for pretraining and post-training."""
