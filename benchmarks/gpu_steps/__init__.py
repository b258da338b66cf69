"""Steps of gpu.py and the processes that run them."""
