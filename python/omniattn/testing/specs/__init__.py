"""OpSpecs and published variants, a file for each family of ops."""
