"""The REST side: routes, validation, layouts, errors. Knows text and streams; never the engine or the wire."""
