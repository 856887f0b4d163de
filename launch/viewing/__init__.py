"""The page of ``launch.view``, and its talk with a server."""
