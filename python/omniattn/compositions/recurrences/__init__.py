"""Recurrences that solve or descend on past tokens, log-linear attention, convolutions."""
