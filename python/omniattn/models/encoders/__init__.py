"""Text encoders other than BERT."""
