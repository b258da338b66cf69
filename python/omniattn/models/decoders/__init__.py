"""The decoder, and families of decoders as data."""
