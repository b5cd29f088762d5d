from tests.malletrain.one_thread import one_thread  # noqa: F401
