import math

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.special import expit

from dpopt import clipping, registry, training
from dpopt.cells import Cell
from dpopt.optimizers.dp_sgd import DPSGD
from dpopt.privacy import sampling
from dpopt.privacy.calibration import calibrate
from dpopt.privacy.data import DataOracle
from dpopt.runs.prepare import prepare
from dpopt.workloads.base import Split
from dpopt.workloads.gmm import CENTRES, MixturePosterior


@pytest.fixture
def workload():
    return registry.create_workload("gmm")


@pytest.fixture
def posterior():
    """One of three components whose parameters are nothing special."""
    model = MixturePosterior(3, 1000)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3, generator=generator)
    return model.double()


def weights_of(theta):
    """pi of the sticks, one broken off after the other."""
    left, pi = 1.0, []
    for k, stick in enumerate(theta[:2]):
        pi.append(left * expit(stick - math.log(2 - k)))
        left -= pi[-1]
    return np.array([*pi, left])


def log_prior_of(theta):
    """scipy's densities of pi, mu and sigma, times the numerical Jacobian of theta -> (pi, mu, sigma)."""
    step = 1e-5
    jacobian = np.stack(
        [(weights_of(theta + step * e) - weights_of(theta - step * e)) / (2 * step) for e in np.eye(11)]
    )
    change = np.log(abs(np.linalg.det(jacobian[:2, :2]))) + theta[8:].sum()
    dirichlet = stats.dirichlet.logpdf(weights_of(theta), np.ones(3))
    normal = stats.norm.logpdf(theta[2:8]).sum()
    return dirichlet + normal + stats.invgamma.logpdf(np.exp(theta[8:]), 1).sum() + change


def log_likelihood_of(theta, x):
    means, variances = theta[2:8].reshape(3, 2), np.exp(theta[8:])
    densities = [stats.multivariate_normal.pdf(x, m, v * np.eye(2)) for m, v in zip(means, variances, strict=True)]
    return np.log(weights_of(theta) @ np.stack(densities))


def true_log_density(x, centres):
    parts = torch.distributions.MultivariateNormal(centres, torch.eye(2)).log_prob(x[:, None])
    return parts.logsumexp(dim=1) - math.log(len(centres))


def test_data_are_the_papers(workload):
    train, validation, test = workload.splits(0)
    assert [len(split.x) for split in (train, validation, test)] == [1000, 0, 100]
    assert train.x.shape == (1000, 2)
    for k, centre in enumerate(CENTRES):
        points = train.x[train.y == k]
        assert len(points) == pytest.approx(200, abs=50)
        torch.testing.assert_close(points.mean(0), torch.tensor(centre), atol=0.25, rtol=0)
        torch.testing.assert_close(torch.cov(points.T), torch.eye(2), atol=0.35, rtol=0)


def test_densities_are_scipys(posterior):
    theta = torch.randn(2, 4, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    x = torch.tensor([[0.3, -1.0], [2.0, 0.5]], dtype=torch.float64)
    rows = [[t.numpy() for t in samples] for samples in theta]
    expected = [[log_likelihood_of(t, point) for t in samples] for samples, point in zip(rows, x.numpy(), strict=True)]
    np.testing.assert_allclose(posterior.log_likelihood(theta, x).detach(), expected, rtol=1e-9)
    prior = [[log_prior_of(t) for t in samples] for samples in rows]
    np.testing.assert_allclose(posterior.log_prior(theta).detach(), prior, rtol=1e-6)
    scales = posterior.log_scale.detach().exp()[0].numpy()
    np.testing.assert_allclose(posterior.entropy().detach(), [stats.norm(scale=scales).entropy().sum()], rtol=1e-12)


def test_output_is_the_bound_and_the_predictive(posterior):
    """Both from the samples themselves: theta = loc + scale noise, which is also what a point's noise is."""
    x = torch.randn(3, 2, dtype=torch.float64)
    noise = torch.randn(3, 5, 11, dtype=torch.float64)
    theta = (posterior.loc + posterior.log_scale.exp() * noise).detach().numpy()
    output = posterior(torch.cat([x, noise.flatten(1)], dim=1)).detach()
    entropy = float(posterior.entropy().detach())
    for i, samples in enumerate(theta):
        likelihood = np.array([log_likelihood_of(t, x[i].numpy()) for t in samples])
        kl = np.mean([-log_prior_of(t) for t in samples]) - entropy
        assert float(output[i, 0]) == pytest.approx(likelihood.mean() - kl / 1000, rel=1e-6)
        assert float(output[i, 1]) == pytest.approx(np.log(np.exp(likelihood).mean()), rel=1e-6)


def test_the_start_tells_components_apart(workload):
    torch.manual_seed(0)
    model = workload.model()
    sticks, means, log_variances = model._parts(model.loc.detach()[0])
    torch.testing.assert_close(model._log_weights(sticks).exp(), torch.full((5,), 0.2))
    assert torch.cdist(means, means)[~torch.eye(5, dtype=torch.bool)].min() > 0.1
    assert not log_variances.any()


def test_the_records_of_a_batch_share_their_samples():
    samples = 7
    workload = registry.create_workload("gmm", samples=samples)
    x = workload.splits(0).train.x[:6]
    torch.manual_seed(0)
    inputs = workload.augment(workload.transform(x))
    assert inputs.shape == (6, 2 + 19 * samples)
    assert torch.equal(inputs[:, :2], x)
    assert torch.equal(inputs[:1, 2:].expand(6, -1), inputs[:, 2:])
    torch.manual_seed(0)
    assert torch.equal(workload.augment(x), inputs)
    assert not torch.equal(workload.augment(x), inputs)
    model = workload.model()
    torch.testing.assert_close(model(x)[3:5], model(x[3:5]))  # of points alone, as in an evaluation


def trained(workload, train, optimizer, epsilon, draws):
    """`workload`'s model trained on `train`: its engine and the optimizer's last state."""
    engine = clipping.engine(workload.model(), workload.loss, "bookkeeping")
    rate = workload.batch_size / len(train.x)
    privacy = {"epsilon": epsilon, "delta": 1e-6, "accountant": "rdp"}
    plan = calibrate(optimizer, rate=rate, draws=draws, dimension=engine.dimension, **privacy)
    oracle = DataOracle(engine, train.x, train.y, plan, draw_seed=0, noise_seed=0, transform=workload.augment)
    *_, (state, _) = training.steps(optimizer, oracle, optimizer.init(engine.theta))
    return engine, state


@pytest.mark.slow
def test_without_noise_the_true_density_is_learnt(workload):
    """Of components that stand apart, within 0.03 nats, and so well above the fit of one Gaussian."""
    centres, generator = 2 * torch.tensor(CENTRES), torch.Generator().manual_seed(0)
    train = workload.splits(0).train
    train = Split(train.x + torch.tensor(CENTRES)[train.y], train.y)
    test = torch.randn(1000, 2, generator=generator) + centres.repeat(200, 1)
    torch.manual_seed(0)
    engine, state = trained(workload, train, registry.create("dp_sgd", lr=0.1, clip=10.0), math.inf, 1200)
    score = float(workload.metric(engine.outputs(state.theta, test), test).mean())
    assert abs(score - float(true_log_density(test, centres).mean())) < 0.03
    single = torch.distributions.MultivariateNormal(train.x.mean(0), torch.cov(train.x.T)).log_prob(test).mean()
    assert score > float(single) + 0.08


@pytest.mark.slow
def test_under_privacy_it_comes_near_and_adadp_forgets_its_start(workload):
    train, _, test = workload.splits(0)
    sizes = []
    for start in (0.01, 1.0):
        torch.manual_seed(0)
        optimizer = registry.create("adadp", lr=start, tau=0.1, reject=True)
        engine, state = trained(workload, train, optimizer, 5.669, 600)
        sizes.append(float(state.eta))
        score = float(workload.metric(engine.outputs(state.theta, test.x), test.y).mean())
        assert score > float(true_log_density(test.x, torch.tensor(CENTRES)).mean()) - 0.1
    assert sizes[0] == pytest.approx(sizes[1], rel=0.2)


def test_a_draw_is_never_split_however_large_it_is():
    """Its records share a posterior sample: in two parts, one more record would move others to another sample."""
    gmm = registry.create_workload("gmm")
    described = registry.spec("workload", "gmm", gmm), registry.spec("optimizer", "dp_sgd", DPSGD())
    cell = Cell(*described, 5.0, 1e-6, "rdp", batch_size=20, epochs=0.1, seed=0, kernel=sampling.REVISION)
    oracle = prepare(cell, device="cpu", physical_batch=4).oracle
    assert len(sampling.physical_batches(np.arange(1000), oracle._size, oracle._multiple)) == 1
