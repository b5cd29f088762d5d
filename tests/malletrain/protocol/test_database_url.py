"""No password of a database's URL is shown, wherever it is in the URL."""

import pytest

from malletrain.protocol.database_url import without_password, without_passwords


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql+psycopg://ann:s3cret@db:5432/m", "postgresql+psycopg://ann:***@db:5432/m"),
        ("postgresql://ann:s3@cret@db/m", "postgresql://ann:***@db/m"),
        ("postgresql://ann:s3/cret@db/m", "postgresql://ann:***@db/m"),
        ("postgresql://ann:s3?cret@db/m", "postgresql://ann:***@db/m"),
        ("postgresql://ann:5432@db/m", "postgresql://ann:***@db/m"),
        (
            "postgresql://ann:s3cret@db/m?application_name=a@b",
            "postgresql://ann:***@db/m?application_name=a@b",
        ),
        ("postgresql://db:5432/m?application_name=a@b", None),
        (
            "postgresql://ann@/m?host=db&password=s3cret&sslpassword=s3cret&port=1",
            "postgresql://ann@/m?host=db&password=***&sslpassword=***&port=1",
        ),
        ("postgresql://@/m?Password=s3cret", "postgresql://@/m?Password=***"),
        ("postgresql//ann:s3cret@db/m", "***@db/m"),
        ("postgresql://ann:s3cret/m", "postgresql://ann:***"),
        ("postgresql://[::1]:5432/m", None),
        ("postgresql://ann:s3cret@[::1]:5432/m", "postgresql://ann:***@[::1]:5432/m"),
        ("postgresql+psycopg://db/m", None),
        ("sqlite:////var/lib/m:a@b/malletrain.db", None),
        ("malletrain.db", None),
        ("", None),
    ],
)
def test_a_password_is_hidden_and_nothing_else(url, shown):
    assert without_password(url) == (url if shown is None else shown)
    assert "s3" not in without_password(url)


def test_passwords_in_a_text_are_hidden():
    text = 'database = "Pg://ann:s3cret@db/m" of tcp://HOST:PORT, not pg://db/m?password=s3cret.'
    assert without_passwords(text) == (
        'database = "Pg://ann:***@db/m" of tcp://HOST:PORT, not pg://db/m?password=***'
    )
