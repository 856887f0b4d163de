"""The start-up checks: they need no Ray, load no model, and raise before anything is started.

``startup`` holds the sequence of each command. It calls ``settings`` (the configuration by itself),
``serving`` (the engine, and the model that adapters are for), ``replay`` (the recording), ``workload`` (its
fit to the tasks and the model's folder), ``gpus`` (of this machine) and ``trial`` (one step of the first
task). ``notices`` checks nothing: it tells what a user should know of a valid configuration. What can only be
checked against a cluster follows when Ray answers: see ``launch.process.cluster.check_resources``.
"""
