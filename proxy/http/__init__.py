"""The layers between the wire and the endpoints: connections, request ids, bounds, errors and bodies."""
