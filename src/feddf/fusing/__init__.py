"""``feddf fuse``: FedDF with one round and no clients, for models that were trained already.

(A package called ``fuse`` would take the place of the function ``feddf.fuse`` as soon as a module in it is imported.)
"""
