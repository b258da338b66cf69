"""Position encodings: rotary, sinusoidal, ALiBi and grids."""
