TRACES = {}
