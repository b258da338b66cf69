"""Dense attention layers."""
