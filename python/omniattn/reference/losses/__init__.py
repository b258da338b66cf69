"""Losses fused with the computation of logits, for pretraining and post-training."""
