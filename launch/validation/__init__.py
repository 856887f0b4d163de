"""The start-up checks: they need no Ray, load no model, and raise before anything is started.

``launch.training.trainer``, ``launch.evaluate`` and ``launch.serve`` have the sequences of their checks, from
``settings`` (the configuration by itself), ``serving`` (the engine, and the model that adapters are for),
``replay`` (the recording), ``workload`` (its fit to the tasks and the model's folder), ``resources`` (GPUs of
this machine) and ``trial`` (one step of the first task). ``resources`` also adds up what a run needs of a
cluster, and ``notices`` finds what a user should know of a valid configuration. What can only be checked
against a cluster follows when Ray answers: see ``launch.cluster.session.check_resources``.
"""
