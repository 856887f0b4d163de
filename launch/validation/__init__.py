"""The start-up checks: they need no Ray, load no model, and raise before anything is started.

``startup`` holds the sequence of each command. It calls ``settings`` (the configuration by itself),
``workload`` (its fit to the tasks and the model's folder), ``trial`` (one step of the first task) and
``serving`` (the address). What can only be checked against a cluster follows when Ray answers: see
``launch.process.cluster.check_resources``.
"""
