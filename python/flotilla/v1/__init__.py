"""Messages of the API, generated from proto/flotilla/v1 by generate.py."""
