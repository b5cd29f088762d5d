"""Who counts as whom."""

import pytest

from malletrain.config.model import ConfigError, parse_config
from malletrain.core.events import Quota
from malletrain.daemon.engine.parties import Parties, primary_group
from malletrain.daemon.site.settings import controller_settings
from scavenger.slurm.associations import parse_associations
from tests.scavenger.slurm.test_associations import TREE, USERS

SLURM = '[scheduler]\nkind = "slurm"\n[scheduler.slurm]\npartition = "low"\n'


def parties(text, groups=None):
    return Parties(parse_config(SLURM + text), (groups or {}).get)


def test_nobodys_share_is_counted_unless_asked_for():
    config = parse_config(SLURM)
    assert Parties(config).party("ann") == ""
    assert controller_settings(config).shares is None
    assert Parties(config).quotas("ann") == ()
    assert Parties(config).size_refusal("ann", 1000) == ""
    assert Parties(config).jobs_refusal("ann", ["ann"] * 1000) == ""


def test_by_user_group_and_account():
    assert parties('[shares]\nby = "user"').party("ann") == "ann"
    all_parties = parties('[shares]\nby = "group"', {"ann": "physics", "bob": ""})
    assert (all_parties.party("ann"), all_parties.party("bob")) == ("physics", "(no group)")
    all_parties = parties('[shares]\nby = "account"\naccounts = ["physics: ann, bob"]')
    assert (all_parties.party("bob"), all_parties.party("cyd")) == ("physics", "(no account)")
    assert primary_group("root") == "root"
    assert primary_group("nobody there") == ""


def test_weights_of_slurm_and_of_the_site():
    all_parties = parties('[shares]\nby = "account"\nweights_from = "slurm"\nweights = ["arts 7"]')
    all_parties.learned(parse_associations(TREE, USERS))
    weights = all_parties.weights()
    assert weights["arts"] == 7.0
    assert weights["optics"] == pytest.approx(3 * weights["lasers"])
    assert all_parties.party("ann") == "optics"
    assert all_parties.account("nobody") == ""


def test_what_the_controller_is_told():
    text = '[shares]\nby = "user"\nweights = ["ann 2"]\nothers = 0.5\nhalf_life = "2 d"\n'
    shares = controller_settings(
        parse_config(SLURM + text + 'double_after = "1 h"\nnode_weights = ["a100 4"]')
    ).shares
    assert shares is not None
    assert (shares.weight("ann"), shares.weight("bob")) == (2.0, 0.5)
    assert (shares.half_life_s, shares.double_after_s) == (172800, 3600)
    assert shares.classes == {"a100": 4}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[shares]\nweights = ["ann"]', "write each name once"),
        ('[shares]\nweights = ["ann 0"]', "a number above 0"),
        ('[shares]\nweights = ["ann 1", "ann 2"]', "write each name once"),
        ('[shares]\naccounts = ["physics ann", "arts ann"]', "each user in one account only"),
        ('[shares]\nby = "everybody"', "accepted is"),
        ('[quotas]\nown = ["user ann"]', "with nodes and jobs"),
        ('[quotas]\nown = ["user ann 1 1", "user ann 2 2"]', "write each user and account once"),
    ],
)
def test_what_makes_no_sense_is_refused(text, words):
    with pytest.raises(ConfigError, match=words):
        parse_config(SLURM + text)


def test_slurms_associations_need_slurm():
    with pytest.raises(ConfigError, match="the main scheduler is not Slurm"):
        parse_config('[scheduler]\nkind = "local"\n[shares]\nweights_from = "slurm"')


def test_quotas_of_users_and_accounts():
    all_parties = parties(
        "[quotas]\nuser_nodes = 8\naccount_nodes = 20\naccount_jobs = 3\n"
        'own = ["user ann 0 1", "account arts 2 0"]\n'
        '[shares]\naccounts = ["arts ann bob", "physics cyd"]'
    )
    assert all_parties.quotas("ann") == (Quota("account arts", 2),)
    assert all_parties.quotas("bob") == (Quota("user bob", 8), Quota("account arts", 2))
    assert all_parties.quotas("dan") == (Quota("user dan", 8),)
    assert "account arts may have 2 at once" in all_parties.size_refusal("bob", 3)
    assert all_parties.jobs_refusal("ann", ["bob"] * 9) == ""
    assert "user ann has 1 job that has not ended" in all_parties.jobs_refusal("ann", ["ann"])
    assert "account physics has 3 jobs" in all_parties.jobs_refusal("cyd", ["cyd"] * 3)
