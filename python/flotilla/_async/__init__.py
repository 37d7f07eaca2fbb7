"""The client with async calls, from which generate.py makes `_sync`."""
