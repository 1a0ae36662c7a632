REAL = {}
