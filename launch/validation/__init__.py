"""The start-up checks: they need no Ray, load no model, and raise before anything is started.

``startup`` holds the sequence of each command. ``settings`` checks the configuration by itself, ``workload``
its fit to the agent, the tasks and the model's folder, and ``trial`` plays one step of the first task. What
can be checked against a cluster only (``launch.process.cluster.check_resources``) follows once Ray answers.
"""
