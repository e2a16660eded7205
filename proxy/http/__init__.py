"""What lies between the wire and the endpoints: request ids, bounds, errors, bodies."""
