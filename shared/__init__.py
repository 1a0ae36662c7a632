"""What the controller and the workers must agree on: words, layouts, digests, messages. Stdlib and msgpack only."""
