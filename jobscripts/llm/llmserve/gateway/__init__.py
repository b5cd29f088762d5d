"""The gateway: the OpenAI API on the head node, for users with keys, in front of replicas that come
and go. ``app`` has the routes, ``configuration`` the operator's file, ``keys`` the users' keys.
"""
