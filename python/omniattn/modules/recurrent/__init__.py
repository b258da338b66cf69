"""Token mixers with a recurrent state."""
