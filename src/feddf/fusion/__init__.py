"""How updates become the next server state: methods as compositions of small functions.

A method by name is a function ``(resources, settings, engine)`` that returns a fusion, which is itself a function
``(server, updates, seed)``; :data:`feddf.config.names.METHODS` lists them.
"""
