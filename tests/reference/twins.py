"""Slow float64 twins of the optimizers, one number at a time, written from the papers' equations and nothing else.

Each twin takes the same answers as the optimizer: `ask.gradient` and `ask.losses` are a noisy quadratic's.
"""

import math


def sgd(ask, theta, steps, lr, momentum=0.0, weight_decay=0.0):
    b = [0.0] * len(theta)
    for _ in range(steps):
        g = ask.gradient([(1.0, theta)])
        b = [momentum * bi + gi + weight_decay * ti for bi, gi, ti in zip(b, g, theta, strict=True)]
        theta = [ti - lr * bi for ti, bi in zip(theta, b, strict=True)]
    return theta


def fiber(ask, theta, steps, lr, kappa=0.7, gamma=0.5, omega=0.3, betas=(0.9, 0.999), eps=1e-8, eps_v=1e-6,
          weight_decay=0.0, correction="asymptotic"):  # fmt: skip
    n = len(theta)
    a = (1 - kappa) / (kappa * gamma)
    previous, filtered, r, m, v = list(theta), [0.0] * n, [0.0] * n, [0.0] * n, [0.0] * n
    history = []  # variance of the filtered noise after each step, from the filter's impulse response
    for t in range(steps):
        ahead = [ti + gamma * (ti - pi) for ti, pi in zip(theta, previous, strict=True)]
        g = ask.gradient([(a, ahead), (1 - a, theta)])
        variance = ask.std**2
        history.append(variance * sum(h * h for h in impulse_response(omega, t + 1)))
        exact = sum((1 - betas[1]) * betas[1] ** (t - s) * history[s] for s in range(t + 1)) / (1 - betas[1] ** (t + 1))
        subtract = {
            "asymptotic": (2 - omega) / (4 - 3 * omega) * variance,
            "exact": exact,
            "unfiltered": variance,
            "off": 0.0,
        }[correction]
        following = []
        for i in range(n):
            nu = g[i] - filtered[i]
            r[i] = (1 - omega) * r[i] + omega * nu
            filtered[i] = filtered[i] + r[i]
            m[i] = betas[0] * m[i] + (1 - betas[0]) * filtered[i]
            v[i] = betas[1] * v[i] + (1 - betas[1]) * filtered[i] ** 2
            mhat, vhat = m[i] / (1 - betas[0] ** (t + 1)), v[i] / (1 - betas[1] ** (t + 1))
            vbar = max(vhat - subtract, eps_v)
            following.append((1 - lr * weight_decay) * theta[i] - lr * mhat / (math.sqrt(vbar) + eps))
        previous, theta = theta, following
    return theta


def impulse_response(omega, length):
    """g~ after one unit gradient at step 0: g~_t = 2(1-omega) g~_{t-1} - (1-omega) g~_{t-2} + omega g_t."""
    h = []
    for t in range(length):
        before = h[t - 1] if t >= 1 else 0.0
        earlier = h[t - 2] if t >= 2 else 0.0
        # From a zero start r_0 = omega, so g~_1 = omega + (1 - omega) omega - omega omega = 2 (1 - omega) omega.
        h.append(omega if t == 0 else 2 * (1 - omega) * before - (1 - omega) * earlier)
    return h


def adadp(ask, theta, steps, lr=0.1, tau=1.0, factor="linear", keep="full", reject=False, error_scale=1.0):
    eta = lr
    etas = []
    for _ in range(steps):
        g1 = ask.gradient([(1.0, theta)])
        full = [t - eta * g for t, g in zip(theta, g1, strict=True)]
        middle = [t - eta / 2 * g for t, g in zip(theta, g1, strict=True)]
        g2 = ask.gradient([(1.0, middle)])
        half = [t - eta / 2 * g for t, g in zip(middle, g2, strict=True)]
        squares = [((f - h) / max(1.0, abs(f))) ** 2 for f, h in zip(full, half, strict=True)]
        err = error_scale * math.sqrt(sum(squares))
        kept = full if keep == "full" else half
        theta = theta if reject and err > tau else kept
        ratio = tau / err if factor == "linear" else math.sqrt(tau / err)
        eta = min(max(ratio, 0.9), 1.1) * eta
        etas.append(eta)
    return theta, etas


def hyfreedp(ask, theta, steps, lr=1e-4, probe_every=5, bound="conservative", smoothing=0.0, lr_scale=0.01,
             betas=(0.9, 0.999), eps=1e-8):  # fmt: skip
    """Over AdamW with weight decay 0.01, three probes."""
    eta, r_l, etas, rule = lr, 1.0, [], adam_rule(len(theta), betas, eps)
    for t in range(steps):
        adam_step = rule(t, ask.gradient([(1.0, theta)]), 0.0)
        direction = [d + lr_scale * ti for d, ti in zip(adam_step, theta, strict=True)]
        if t % probe_every == 0:
            minus = [ti - eta * d for ti, d in zip(theta, direction, strict=True)]
            plus = [ti + eta * d for ti, d in zip(theta, direction, strict=True)]
            l_minus, l_0, l_plus = ask.losses([minus, theta, plus], r_l)
            b = (l_plus - l_minus) / (2 * eta)
            a = (l_plus - 2 * l_0 + l_minus) / eta**2
            if a > 0 and b > 0 and l_0 < 0.9 * r_l:
                star = min(max(b / a, eta / 2), 2 * eta)
                eta = smoothing * eta + (1 - smoothing) * star
            r_l = max(l_minus + l_0 + l_plus if bound == "conservative" else l_0, 1e-3)
        theta = [ti - eta * d for ti, d in zip(theta, direction, strict=True)]
        etas.append(eta)
    return theta, etas


def hyfreedp_search_then_decay(ask, theta, steps, lr=1e-4, rounds=10, probe_every=5, base="dp_adam"):
    """A trial of n draws, anew where curvature shows, then the run from its start; `ask.std` is the losses' noise."""
    path, every, begin = base_rule(len(theta), base), base_rule(len(theta), base), theta
    n, path_began = min(rounds, -(-ask.draws_total // probe_every)), 0
    eta, r_l, k, was_usable, etas = lr, 10.0, 0, False, []
    for t in range(steps):
        gradient = ask.gradient([(1.0, theta if k or t >= n else begin)])
        direction, trained = path(t - path_began, gradient, 0.0), every(t, gradient, 0.0)
        direction = direction if t < n else trained
        theta = [ti - (1 - t / ask.draws_total) * eta * d for ti, d in zip(theta, direction, strict=True)]
        if t < n:
            c, z, most = (0.5, 2, 4) if k else (16, 4, 16)
            before, beyond = (step_along(begin, theta, u) for u in (1 - c, 1 + c))
            l_minus, l_0, l_plus = ask.losses([before, theta, beyond], r_l)
            is_curved = l_minus - 2 * l_0 + l_plus > z * math.sqrt(6) * ask.std
            if l_0 >= 0.9 * r_l:
                x = 1 / most if was_usable else 1
            elif is_curved:
                x = 1 + c * (l_minus - l_plus) / (2 * (l_minus - 2 * l_0 + l_plus))
            else:
                x = 1 / most if l_minus - l_plus < -3 * math.sqrt(2) * ask.std else most
            x = min(max(x, 1 / most), most) ** (1 / max(k, 1))
            eta, theta, was_k = x * eta, step_along(begin, theta, x), k
            if l_0 < 0.9 * r_l:
                was_usable = True
                k += k > 0 or is_curved
            r_l = max(l_minus + l_0 + l_plus, r_l / 2, 1e-3)
            if k > was_k == 0 and t < n - 1:
                eta, theta, path, path_began = (t + 1) * eta, begin, base_rule(len(theta), base), t + 1
        if t == n - 1 < ask.draws_total - 1:
            theta, eta = begin, 0.7 * eta if k else lr
        etas.append(eta)
    return theta, etas


def step_along(begin, to, share):
    return [b + share * (t - b) for b, t in zip(begin, to, strict=True)]


def adam_rule(n, betas=(0.9, 0.999), eps=0.0, eps_v=None):
    """Adam's direction; with `eps_v` the second moment is corrected for the noise."""
    m, v = [0.0] * n, [0.0] * n

    def rule(t, g, variance):
        direction = []
        for i in range(n):
            m[i] = betas[0] * m[i] + (1 - betas[0]) * g[i]
            v[i] = betas[1] * v[i] + (1 - betas[1]) * g[i] ** 2
            mhat, vhat = m[i] / (1 - betas[0] ** (t + 1)), v[i] / (1 - betas[1] ** (t + 1))
            if eps_v is not None:
                vhat = max(vhat - variance, eps_v)
            direction.append(mhat / (math.sqrt(vhat) + eps))
        return direction

    return rule


def momentum_rule(n, momentum):
    b = [0.0] * n

    def rule(t, g, variance):
        b[:] = [momentum * bi + gi for bi, gi in zip(b, g, strict=True)]
        return list(b)

    return rule


def base_rule(n, base):
    if isinstance(base, dict):
        return momentum_rule(n, base["momentum"])
    return adam_rule(n, eps=1e-8) if base == "dp_adam" else adam_rule(n, eps_v=1e-6)


def adambc(ask, theta, steps, lr, betas=(0.9, 0.999), eps_v=1e-6):
    rule = adam_rule(len(theta), betas, eps_v=eps_v)
    for t in range(steps):
        direction = rule(t, ask.gradient([(1.0, theta)]), ask.std**2)
        theta = [ti - lr * d for ti, d in zip(theta, direction, strict=True)]
    return theta


def filtered(history, h):
    """sum_s h_s g_{t-s} for the gradients g_0..g_t."""
    t = len(history) - 1
    return [sum(h[s] * history[t - s][i] for s in range(t + 1)) for i in range(len(history[0]))]


def disk(ask, theta, steps, lr, base="dp_adam", kappa=0.7, gamma=0.5):
    """The filter as a convolution with its impulse response kappa (1 - kappa)^s."""
    a, rule = (1 - kappa) / (kappa * gamma), base_rule(len(theta), base)
    h = [kappa * (1 - kappa) ** s for s in range(steps)]
    previous, history = theta, []
    for t in range(steps):
        ahead = [ti + gamma * (ti - pi) for ti, pi in zip(theta, previous, strict=True)]
        history.append(ask.gradient([(a, ahead), (1 - a, theta)]))
        variance = ask.std**2 * sum(hs**2 for hs in h[: t + 1])
        direction = rule(t, filtered(history, h), variance)
        previous, theta = theta, [ti - lr * d for ti, d in zip(theta, direction, strict=True)]
    return theta


def doppler(ask, theta, steps, lr, base="dp_adam", a=(1.0, -1.98342955, 0.98549544),
            b=(1.6332e-4, 3.2665e-4, 1.6332e-4)):  # fmt: skip
    """The filter as a convolution with its impulse response, which the recursion gives."""
    rule, history, h = base_rule(len(theta), base), [], []
    for t in range(steps):
        past = sum(a[tau] * h[t - tau] for tau in range(1, len(a)) if tau <= t)
        h.append((b[t] if t < len(b) else 0.0) - past)
        c = sum(h)
        history.append(ask.gradient([(1.0, theta)]))
        variance = ask.std**2 * sum(hs**2 for hs in h) / c**2
        direction = rule(t, [m / c for m in filtered(history, h)], variance)
        theta = [ti - lr * d for ti, d in zip(theta, direction, strict=True)]
    return theta


def scheduled(ask, theta, steps, lr, schedule="cosine", warmup=0.0, final=0.0):
    """Over Adam, with as many draws as steps."""
    rule, rising, etas = adam_rule(len(theta), eps=1e-8), math.ceil(warmup * steps), []
    for t in range(steps):
        p = (t - rising) / (steps - rising)
        falling = {"constant": 1.0, "linear": 1 - p, "cosine": 0.5 + 0.5 * math.cos(math.pi * p)}[schedule]
        etas.append(lr * (t + 1) / rising if t < rising else lr * (final + (1 - final) * falling))
        direction = rule(t, ask.gradient([(1.0, theta)]), 0.0)
        theta = [ti - etas[-1] * d for ti, d in zip(theta, direction, strict=True)]
    return theta, etas


def adadp_hybrid(ask, theta, steps, lr=0.1, adaptive_epochs=None, decay=0.1):
    adaptive = ask.draws_total / 2 if adaptive_epochs is None else adaptive_epochs / ask.rate
    switch = int(round(adaptive, 6)) // 2 * 2
    theta, etas = adadp(ask, theta, min(steps, switch // 2), lr)
    found = etas[-1]
    for t in range(steps - switch // 2):
        epochs_past = int((t + 0.5) * ask.rate)  # half a draw on, so that rounding cannot matter
        etas.append(found / (1 + decay * (epochs_past + 1)))
        g = ask.gradient([(1.0, theta)])
        theta = [ti - etas[-1] * gi for ti, gi in zip(theta, g, strict=True)]
    return theta, etas


def adadp_equilibrium(ask, theta, steps, tau=1.0, lr=10.0):
    eta = min(tau * math.sqrt(2) / (ask.std * math.sqrt(len(theta))), lr)
    return sgd(ask, theta, steps, eta), [eta] * steps
