import math

import pytest

from dpopt.errors import ConfigError
from dpopt.privacy import Draw, Ledger

PROBE, PLAIN = Draw(0.02, (0.93, 5.7, 5.7, 5.7)), Draw(0.02, (0.93,))


def test_effective_noise():
    assert Draw(0.1, (2.0,)).effective_noise == 2.0
    assert Draw(0.1, (1.0, 1.0)).effective_noise == pytest.approx(1 / math.sqrt(2))
    assert PROBE.effective_noise == pytest.approx((0.93**-2 + 3 * 5.7**-2) ** -0.5)
    assert Draw(0.1, (1.0, 0.0)).effective_noise == 0
    assert Draw(0.1, ()).effective_noise == math.inf


def test_runs_are_encoded_and_order_counts():
    ledger = Ledger([PROBE, PLAIN, PLAIN, PROBE])
    assert len(ledger) == 4
    assert list(ledger) == [PROBE, PLAIN, PLAIN, PROBE]
    assert ledger.counts() == {PROBE: 2, PLAIN: 2}
    assert ledger != Ledger([PLAIN, PROBE, PROBE, PLAIN])
    joined = Ledger([PROBE, PLAIN]) + Ledger([PLAIN, PROBE])
    assert joined == ledger


def test_beginnings():
    ledger = Ledger([PROBE, PLAIN, PLAIN, PROBE])
    assert all(ledger.starts_with(Ledger(part)) for part in ([], [PROBE], [PROBE, PLAIN], [PROBE, PLAIN, PLAIN, PROBE]))
    assert not ledger.starts_with(Ledger([PLAIN]))
    assert not ledger.starts_with(Ledger([PROBE, PLAIN, PLAIN, PROBE, PLAIN]))


def test_json_round_trip_is_exact():
    ledger = Ledger([Draw(1 / 3, (0.1 + 0.2, 1e-17)), PLAIN, PLAIN])
    assert Ledger.from_json(ledger.to_json()) == ledger
    many = Ledger()
    for _ in range(6000):
        many.append(PROBE)
        many.append(PLAIN, 4)
    assert len(many.to_json()) < 100_000
    assert Ledger.from_json(many.to_json()) == many


NEGATIVE = '{"draws":[{"rate":0.5,"noises":[1.0]}],"runs":[[-1,2]]}'  # Python would count from the end
DAMAGED = ["", "[]", "{}", '{"draws":[],"runs":[[0,1]]}', '{"draws":[{"rate":2}],"runs":[]}', NEGATIVE, "[" * 10**5]


@pytest.mark.parametrize("text", DAMAGED, ids=range(7))
def test_damaged_json(text):
    with pytest.raises(ConfigError, match="ledger"):
        Ledger.from_json(text)


@pytest.mark.parametrize(("rate", "noise"), [(0.0, 1.0), (1.1, 1.0), (0.5, -1.0), (0.5, math.inf), (0.5, math.nan)])
def test_impossible_draws(rate, noise):
    with pytest.raises(ConfigError):
        Draw(rate, (noise,))
