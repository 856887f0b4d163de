"""A program's time on a cluster: ``session`` joins or starts one, ``turns`` orders the starts of programs,
``serve_address`` claims the address for clients, and ``served_model`` serves a model for a while.
"""
