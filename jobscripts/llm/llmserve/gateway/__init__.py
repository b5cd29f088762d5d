"""The gateway: the OpenAI API on the head node, for users with keys, in front of replicas that come
and go. ``app`` answers HTTP, ``configuration`` is the operator's file, ``keys`` says who calls.
"""
