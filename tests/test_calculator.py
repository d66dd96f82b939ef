"""The calculator page: its JavaScript against the Python it came from, and the whole page in a real browser."""

import json
import random
import re
import shutil
from decimal import ROUND_HALF_UP, Decimal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from py_mini_racer import MiniRacer

from arithmetic import BITS, budget, divisors, readable, readable_seconds, resized, robot, rounded, shards, uptraining
from calculator.build import arithmetic, page
from shapes import find_shape, presets

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt install chromium")
SHAPES = {name: find_shape("shape", name) for name in presets()}

KIB, MIB = 2**10, 2**20

# ---------------------------------------------------------------------------------------------------------------------
# the translated functions, in V8 without a browser


@pytest.fixture(scope="module")
def javascript():
    """javascript("budget", shape, s) calls a translated function -> its answer, by way of JSON."""
    engine = MiniRacer()
    engine.eval(arithmetic())

    def call(name, *args):
        return json.loads(engine.eval(f"JSON.stringify({name}({','.join(map(json.dumps, args))}))"))

    return call


def equal(a, b):
    """The same, numbers to the last bits of a float: powers and quotients may be rounded differently."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, int | float) and not isinstance(a, bool):
        return type(b) in (int, float) and abs(a - b) <= 1e-12 * abs(a)
    return type(a) is type(b) and a == b


@st.composite
def shapes(draw):
    shape = SHAPES[draw(st.sampled_from(sorted(SHAPES)))]
    if shape["latent"]:
        return shape
    n_kv = draw(st.sampled_from(divisors(shape["n_head"])))
    return resized(shape, draw(st.integers(1, 128)), n_kv, draw(st.sampled_from([16, 20, 64, 80, 128])))


@st.composite
def cases(draw):
    shape = draw(shapes())
    tps = [tp for tp in divisors(shape["n_head"]) if shards(shape["n_head"], shape["n_kv"], tp)]
    kinds = [kind for kind in BITS if not (shape["latent"] and kind.startswith("int"))]
    s = {
        "context": draw(st.integers(1, 2**20)),
        "batch": draw(st.integers(1, 1024)),
        "kv_dtype": draw(st.sampled_from(kinds)),
        "group": draw(st.sampled_from([16, 32, 64])),
        "residual": draw(st.sampled_from([0, 32, 128])),
        "weight_dtype": draw(st.sampled_from(["fp32", "fp16", "fp8"])),
        "memory": draw(st.integers(1, 2**42)),
        "bandwidth": draw(st.floats(1e9, 1e13)),
        "compute": draw(st.floats(1e12, 1e15)),
        "tp": draw(st.sampled_from(tps)),
        "draft": SHAPES["nanogqa"] if draw(st.booleans()) and 8 % max(tps) == 0 else None,
    }
    return shape, s


@settings(max_examples=150)
@given(case=cases())
def test_the_pages_functions_are_the_budgets(javascript, case):
    shape, s = case
    assert equal(budget(shape, s), javascript("budget", shape, s))


@settings(max_examples=30)
@given(case=cases(), steps=st.integers(1, 8), rate=st.floats(0.5, 100))
def test_the_robot_view_too(javascript, case, steps, rate):
    shape, s = case
    r = {"cameras": 2, "image_tokens": 256, "prompt_tokens": 32, "action_tokens": steps, "history": steps, "rate": rate}
    assert equal(robot(shape, s, r), javascript("robot", shape, s, r))


@settings(max_examples=30)
@given(case=cases(), fraction=st.floats(0, 1))
def test_the_training_view_too(javascript, case, fraction):
    shape, s = case
    t = {"groups": 1, "tokens": 1e9, "fraction": fraction, "utilisation": 0.4, "price": 2.0, "memory": 2**34}
    assert equal(uptraining(shape, s, t), javascript("uptraining", shape, s, t))


@settings(max_examples=300)
@given(n=st.one_of(st.integers(0, 2**53), st.floats(0, 1e15), st.integers(0, 4000).map(lambda k: k * 1024 / 200)))
def test_bytes_and_durations_are_written_the_same(javascript, n):
    assert readable(n) == javascript("readable", n)
    assert readable_seconds(n / 1e9) == javascript("readable_seconds", n / 1e9)
    assert rounded(n % 1e12, 2) == javascript("rounded", n % 1e12, 2)


def half_up(x, digits):
    return str(Decimal(x).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP))


@settings(max_examples=500)
@given(n=st.integers(0, 10**9), shift=st.integers(0, 12), digits=st.integers(0, 3))
@example(n=5, shift=1, digits=0)
@example(n=1, shift=3, digits=2)
def test_rounding_is_half_upwards(n, shift, digits):
    assert rounded(n / 2**shift, digits) == half_up(n / 2**shift, digits)  # of exact halves too


@settings(max_examples=500)
@given(st.one_of(st.integers(0, 2**60), st.builds(lambda k, m: k * 2**m, st.integers(0, 2**12), st.integers(0, 48))))
def test_bytes_are_read_with_three_digits_in_the_unit_that_suits_them(n):
    text, unit = readable(n).split(" ")
    power = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"].index(unit)
    exact, digits = Decimal(n) / 1024**power, len(text.partition(".")[2])
    assert text == half_up(exact, digits)
    assert len(text.replace(".", "")) == 3 or power == digits == 0 or exact >= 999.5
    assert power == 0 or Decimal("0.9995") < exact and (exact < 1023.5 or power == 5)


@pytest.mark.parametrize(
    "n, text",
    [(0, "0 bytes"), (512, "512 bytes"), (1023, "1023 bytes"), (1024, "1.00 KiB"), (36864, "36.0 KiB"), (2**30, "1.00 GiB"),
     (999.5 * MIB, "1000 MiB"), (1023.4 * MIB, "1023 MiB"), (1023.5 * MIB, "1.00 GiB"), (9.995 * KIB, "10.0 KiB"), (99.95 * KIB, "100 KiB"), (546.75 * MIB, "547 MiB")],
)  # fmt: skip
def test_bytes_at_the_edges_of_their_units(n, text):
    assert readable(n) == text


@pytest.mark.parametrize(
    "t, text", [(285.1e-6, "285.1 µs"), (0.0161, "16.1 ms"), (2.5, "2.50 s"), (1e-3, "1.0 ms"), (1, "1.00 s")]
)
def test_durations_are_read_in_the_unit_that_suits_them(t, text):
    assert readable_seconds(t) == text


def test_the_page_needs_no_network():
    text = page()
    head, ours = text[: text.index("<script>")], text[text.rindex("<script>") :]  # between them Plotly and the functions
    assert not re.search(r"(src|href|action)=[\"']?(https?:)?//", head + ours)
    assert not re.search(r"\b(fetch|XMLHttpRequest|import)\(", ours)


# ---------------------------------------------------------------------------------------------------------------------
# the page as people use it


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(browser, tmp_path):
    """visit("#shape=gpt2-xl") opens the built page -> the browser's tab. Errors and requests fail the test at its end."""
    path, troubles, tabs = tmp_path / "calculator.html", [], []
    path.write_text(page(), encoding="utf-8")

    def visit(address="", **kwargs):
        tab = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **kwargs}).new_page()
        tab.on("pageerror", lambda error: troubles.append(str(error)))
        tab.on("console", lambda message: troubles.append(message.text) if message.type in ("error", "warning") else None)
        tab.on("request", lambda request: troubles.append(request.url) if request.url.startswith("http") else None)
        tab.goto(path.as_uri() + address)
        tab.wait_for_selector("#chart .main-svg")
        tabs.append(tab)
        return tab

    yield visit
    for tab in tabs:
        tab.context.close()
    assert troubles == []


def shown(tab):
    """The numbers on the page by their place in the budget: a value or, where one is said twice, all of them."""
    return dict(tab.eval_on_selector_all("[data-of]", "all => all.map(b => [b.dataset.of, b.textContent])"))


def table(tab, name):
    return tab.eval_on_selector_all(f"#{name} tbody tr", "all => all.map(tr => [...tr.cells].map(td => td.innerText))")


def whole(n, none):
    return none if n is None else f"{n:,}"


def check(tab, call):
    """Everything the page shows is what `budget.py format=json`, run as the page says, answers."""
    command = tab.inner_text("#command")
    assert command.startswith("python budget.py shape=")
    code, out, err = call("budget", *command.split()[2:], "format=json")
    assert code == 0, (command, err)
    b = json.loads(out)
    own, numbers = b["own"], shown(tab)
    want = {key: readable(own[key]) for key in ("conversation_bytes", "cache_bytes", "weight_bytes", "bytes_per_token")}
    want["larger"] = own["larger"]
    want["floor_seconds"] = readable_seconds(own["floor_seconds"])
    want["crossover_tokens"] = whole(own["crossover_tokens"], "at no length")
    want["crossover_batch"] = whole(own["crossover_batch"], "with no number")
    if b["setting"]["tp"] > 1:
        want["cache_bytes_all_devices"] = readable(own["cache_bytes_all_devices"])
    if own["free_bytes"] >= 0:
        want["conversations_fit"] = whole(own["conversations_fit"], "")
        if own["tokens_fit"] is not None:
            want["tokens_fit"] = whole(own["tokens_fit"], "")
    speed = numbers.pop("tokens_per_second").replace(",", "")
    assert abs(float(speed) - own["tokens_per_second"]) <= 0.0501, command
    assert numbers == want, command
    assert table(tab, "dial") == [
        [
            "latent" if b["shape"]["latent"] else "MHA" if row["n_kv"] == b["shape"]["n_head"] else "MQA" if row["n_kv"] == 1 else f"GQA-{row['n_kv']}",
            str(row["n_kv"]), readable(row["cache_bytes"]), readable(row["weight_bytes"]),
            whole(row["tokens_fit"], "no limit"), whole(row["conversations_fit"], ""), readable_seconds(row["floor_seconds"]),
        ]
        for row in b["heads"]
    ], command  # fmt: skip
    assert [row[1:] for row in table(tab, "precision")] == [
        [readable(row["cache_bytes"]), rounded(row["bits_per_value"], 2)] for row in b["precision"]
    ], command
    cells = [cell.replace("\xa0", " ") for row in table(tab, "parallel") for cell in row[1:] if cell != "–"]
    assert cells == [f"{readable(d['each'])} / {readable(d['total'])}" for row in b["parallel"] for d in row["devices"]], (
        command
    )
    marker = tab.evaluate("[chart.data.at(-1).x[0], chart.data.at(-1).y[0]]")
    assert marker == [b["setting"]["context"], own["cache_bytes"] / 2**30]
    return b


@needs_chromium
def test_sixty_settings_by_keyboard_and_mouse_equal_the_script(visit, call):
    tab = visit()
    assert "8,192 tokens takes 1.00 GiB" in tab.inner_text("#headline")
    draw, seen, moved = random.Random(1), set(), set()
    names = sorted(SHAPES)
    for i in range(60):
        if i % 4 == 0:
            tab.focus("#shape")
            tab.keyboard.type(names[i // 4 % len(names)])  # a select jumps to what is typed
            tab.keyboard.press("Tab")
        sliders = tab.eval_on_selector_all("input[type=range]:enabled", "all => all.map(e => e.id)")
        for key in draw.sample(sliders, 3):
            before = tab.inner_text(f"#{key}-says")
            if draw.random() < 0.5:
                tab.focus(f"#{key}")
                for _ in range(draw.randint(1, 5)):
                    tab.keyboard.press(draw.choice(["ArrowRight", "ArrowRight", "ArrowLeft", "End", "Home", "PageUp"]))
            else:
                box = tab.locator(f"#{key}").bounding_box()
                tab.mouse.click(box["x"] + draw.uniform(0.02, 0.98) * box["width"], box["y"] + box["height"] / 2)
            if tab.inner_text(f"#{key}-says") != before:
                moved.add(key)
        seen.add(tab.inner_text("#command"))
        check(tab, call)
    assert len(seen) >= 50
    assert moved == {"n_kv", "kv_dtype", "context", "batch", "n_layer", "head_dim", "memory", "tp", "weight_dtype", "bandwidth"}


@needs_chromium
def test_an_address_holds_the_setting(visit, call):
    tab = visit("#shape=llama2-70b&n_kv=64&context=4374&kv_dtype=int2&batch=6&tp=8&memory=141GiB&bandwidth=4800GB/s")
    b = check(tab, call)
    s = b["setting"]
    assert (b["shape"]["n_kv"], s["context"], s["kv_dtype"], s["batch"], s["tp"]) == (64, 4374, "int2", 6, 8)
    assert (s["memory"], s["bandwidth"]) == (141 * 2**30, 4800e9)
    tab.focus("#n_kv")
    tab.keyboard.press("End")
    again = visit(tab.evaluate("location.hash"))
    assert shown(again) == shown(tab) and again.inner_text("#n_kv-says") == "1 of 64"
    tab.evaluate("location.hash = '#shape=gpt2-small'")
    tab.wait_for_function("document.getElementById('shape').value === 'gpt2-small'")
    assert check(tab, call)["own"]["bytes_per_token"] == 36 * 1024


@needs_chromium
def test_an_address_that_cannot_be_is_said_and_left_out(visit, call):
    tab = visit("#%E0%A4%A")
    assert "%E0%A4%A cannot be read" in tab.inner_text("#note")
    for address, says in [
        ("shape=llama9", "shape=llama9 is unknown"),
        ("shape=nanogqa&n_kv=3", "n_kv=3 is not possible"),
        ("context=-5", "context=-5 is not possible"),
        ("memory=24parsecs", "memory=24parsecs is not possible"),
        ("shape=nanogqa&tp=3", "tp=3 is not possible"),
        ("shape=deepseek-v3&kv_dtype=int2", "kv_dtype=int2 is not possible"),
        ("n_layer=1e99&batch=NaN", "batch=NaN is not possible here, n_layer=1e99 is not possible here"),
        ("memory=GiB80&context=0x100", "context=0x100 is not possible here, memory=GiB80 is not possible here"),
        ("shape=__proto__", "shape=__proto__ is unknown"),
        ("<img src=x onerror=alert(1)>", "<img src is unknown"),
    ]:
        tab.evaluate("address => { location.hash = address }", address)
        tab.wait_for_function("says => document.getElementById('note').textContent.includes(says)", arg=says, timeout=5000)
        check(tab, call)
    tab.focus("#context")
    tab.keyboard.press("ArrowRight")
    assert tab.locator("#note").is_hidden()  # what was wrong is gone


@needs_chromium
@pytest.mark.parametrize("address", ["context=1", "context=16777216", "memory=22.5GiB&bandwidth=25.6GB/s", "batch=65536&tp=32"])
def test_the_chart_has_room_for_what_is_set(visit, call, address):
    tab = visit(f"#{address}")
    own = check(tab, call)["own"]
    (low, high), (bottom, top) = tab.evaluate(
        "[chart.layout.xaxis.range, chart.layout.yaxis.range].map(r => r.map(x => 10 ** x))"
    )
    context, left = tab.evaluate("chart.data.at(-1).x[0]"), tab.evaluate("chart.layout.shapes[1].y0")
    assert low * (1 - 1e-9) <= context <= high * (1 + 1e-9)
    assert bottom <= own["cache_bytes"] / 2**30 <= top and bottom <= left == own["free_bytes"] / 2**30 <= top


@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_lines_stand_out_from_the_paper(visit, scheme):
    tab = visit(color_scheme=scheme)
    colors = tab.evaluate(
        """() => Object.fromEntries(['paper', 'panel', 'ink', 'faint', 'accent', 'mha', 'own', 'mqa', 'budget'].map(
            name => [name, getComputedStyle(document.documentElement).getPropertyValue('--' + name).trim()]))"""
    )

    def luminance(color):
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        parts = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    for paper in ("paper", "panel"):
        for name in ("ink", "faint", "accent", "mha", "own", "mqa", "budget"):
            light, dark = sorted((luminance(colors[paper]), luminance(colors[name])), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= 4.5, (scheme, paper, name)  # WCAG 2.2, 1.4.3


@needs_chromium
def test_the_page_can_be_used_without_seeing_it_or_a_mouse(visit):
    tab = visit()
    order = []
    for _ in range(20):
        tab.keyboard.press("Tab")
        order.append(tab.evaluate("document.activeElement.id"))
    controls = [
        "shape",
        "n_kv",
        "kv_dtype",
        "context",
        "batch",
        "n_layer",
        "head_dim",
        "memory",
        "tp",
        "weight_dtype",
        "bandwidth",
    ]
    assert order[: len(controls) + 2] == [*controls, "reset", "share"]
    for key in controls:
        assert tab.evaluate(f"document.getElementById('{key}').labels.length") == 1
    assert tab.get_attribute("#context", "aria-valuetext") == "8,192 tokens"
    assert "1.00 GiB" in tab.get_attribute("#chart", "aria-label")
    assert tab.get_attribute("#headline", "role") == "status"


@needs_chromium
@pytest.mark.parametrize("width", [320, 390, 820, 1280])
def test_no_width_scrolls_sideways(visit, width):
    tab = visit("#shape=llama2-70b&tp=8", viewport={"width": width, "height": 844})
    assert tab.evaluate("document.documentElement.scrollWidth") <= width


@needs_chromium
def test_a_finger_moves_a_slider_on_a_phone(visit, call):
    tab = visit(viewport={"width": 390, "height": 844}, is_mobile=True, has_touch=True)
    tab.locator("#n_kv").scroll_into_view_if_needed()
    box = tab.locator("#n_kv").bounding_box()
    tab.touchscreen.tap(box["x"] + 0.97 * box["width"], box["y"] + box["height"] / 2)
    assert tab.inner_text("#n_kv-says") == "1 of 32"
    assert check(tab, call)["own"]["bytes_per_token"] == 16 * 1024
