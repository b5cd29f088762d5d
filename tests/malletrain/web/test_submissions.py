"""What the API of the page makes of a submission."""

import pytest
from pydantic import ValidationError

from malletrain.protocol import env
from malletrain.submission.spec import SpecError
from malletrain.web.api import SubmitForm


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("import malletrain\n")
    return str(path)


def test_the_memory_for_data_is_that_of_the_request(script):
    spec = SubmitForm(script=script, data_memory="8G").spec()
    assert spec.env[env.DATA_MEMORY] == "8G"
    assert env.DATA_MEMORY not in SubmitForm(script=script).spec().env
    with pytest.raises(SpecError, match="--data-memory"):
        SubmitForm(script=script, data_memory="plenty").spec()


def test_a_field_that_nobody_knows_is_refused(script):
    with pytest.raises(ValidationError, match="data_memroy"):
        SubmitForm(script=script, data_memroy="8G")
