"""Experts with weighed inputs."""
