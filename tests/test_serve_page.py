"""The page in a real browser: send, stream, stop, regenerate, branch, reload; and what screen readers need of it."""

import pytest

from browser import Browser, find_browser
from mambakit.text.chat import Chat
from mambakit.text.tokens import Bytes
from serve_cases import make_service, running
from test_serve import wait_until

PATH = find_browser()
pytestmark = pytest.mark.skipif(PATH is None, reason="no Chromium is installed here")
MESSAGES = (
    "[...document.querySelectorAll('article')].map(one => [one.className, one.querySelector('.content').textContent])"
)
STATUS = "document.getElementById('status').textContent"


@pytest.fixture(scope="module")
def service():
    service = make_service()
    service.chat = Chat(Bytes(), start=[256])
    service.chat.stops = ()  # it says as much as it may
    return service


@pytest.fixture(scope="module")
def url(service):
    with running(service) as url:
        yield url


@pytest.fixture
def browser(tmp_path, url):
    assert PATH is not None
    browser = Browser(PATH, tmp_path)
    try:
        browser.open(url)
        browser.wait("document.getElementById('model').textContent === 'tiny'")
        yield browser
        assert browser.complaints == []
    finally:
        browser.close()


def set_field(browser, name: str, value: object) -> None:
    browser.run(
        f"(() => {{ const one = document.getElementById({name!r}); one.value = {str(value)!r};"
        " one.dispatchEvent(new Event('change', {bubbles: true})) })()"
    )


def ask(browser, text: str) -> None:
    browser.run("document.getElementById('prompt').focus()")
    browser.type(text)
    browser.press("Enter")


def test_a_conversation(browser, service):
    set_field(browser, "max_tokens", 12)
    set_field(browser, "temperature", 0)
    ask(browser, "hi")
    browser.wait(f"{STATUS}.startsWith('The answer is complete.')")
    [user, answer] = browser.run(MESSAGES)
    assert user == ["user", "hi"]
    assert answer[0] == "assistant"
    assert answer[1]
    assert "12 tokens" in browser.run(STATUS)
    assert "prompt tokens reused" in browser.run("document.querySelector('article.assistant .figures').textContent")
    browser.run("document.querySelector('.again').click()")
    browser.wait(f"{STATUS}.startsWith('The answer is complete.') && document.querySelectorAll('article').length === 2")
    assert browser.run(MESSAGES) == [user, answer]  # at temperature 0

    browser.run("document.querySelectorAll('.branch')[1].click()")
    ask(browser, "and")
    browser.wait("document.querySelectorAll('article').length === 4 && !document.getElementById('send').disabled")
    branch = browser.run(MESSAGES)
    assert branch[:2] == [user, answer]
    assert "document" not in browser.run(STATUS)
    reused = browser.run("[...document.querySelectorAll('.figures')].at(-1).textContent")
    assert int(reused.split(", ")[-1].split()[0]) > 0

    browser.reload()
    assert browser.wait(f"document.querySelectorAll('article').length === 4 && {MESSAGES}") == branch
    names = "[...document.querySelectorAll('#conversations li button:first-child')].map(one => one.textContent)"
    assert browser.run(names) == ["hi (branch)", "hi"]
    browser.run("document.querySelectorAll('#conversations li button:first-child')[1].click()")
    assert browser.run(MESSAGES) == [user, answer]


@pytest.mark.parametrize("how", ["button", "escape"])
def test_stopping(browser, service, how):
    set_field(browser, "max_tokens", 10**9)
    ask(browser, "tell")
    browser.wait("(document.querySelector('article.assistant .content')?.textContent.length ?? 0) > 20")
    assert browser.run("document.getElementById('messages').getAttribute('aria-busy')") == "true"
    if how == "button":
        browser.run("document.getElementById('stop').click()")
    else:
        browser.press("Escape")
    browser.wait(f"{STATUS}.startsWith('Stopped.')")
    wait_until(lambda: not service.generations and service.worker.active == 0)
    [_, answer] = browser.run(MESSAGES)
    assert len(answer[1]) > 20
    browser.reload()
    assert browser.wait(f"document.querySelectorAll('article').length === 2 && {MESSAGES}")[1] == answer


def test_a_key_is_asked_for(tmp_path):
    assert PATH is not None
    with running(make_service(), keys=("secret",)) as url:
        browser = Browser(PATH, tmp_path)
        try:
            browser.open(url)
            browser.wait("document.getElementById('error').textContent.includes('key is needed')")
            set_field(browser, "key", "secret")
            browser.wait("document.getElementById('model').textContent === 'tiny'")
            assert browser.run("document.getElementById('error').hidden")
        finally:
            browser.close()


def test_everything_has_a_name(browser):
    """Fields have labels, buttons have names, and what changes is told."""
    unnamed = "[...document.querySelectorAll('input, textarea')].filter(one => !one.labels.length).map(one => one.id)"
    assert browser.run(unnamed) == []
    set_field(browser, "max_tokens", 2)
    ask(browser, "x")
    browser.wait("!document.getElementById('send').disabled && document.querySelectorAll('article').length === 2")
    nameless = "[...document.querySelectorAll('button')].filter(one => !one.textContent.trim()).length"
    assert browser.run(nameless) == 0
    assert browser.run("document.documentElement.lang") == "en"
    assert browser.run("document.querySelectorAll('[role=log], [role=status], [role=alert]').length") == 3
    assert browser.run("document.activeElement.id") == "prompt"
    browser.press("Tab")
    assert browser.run("document.activeElement.id") == "send"


def test_light_and_dark(browser):
    colours = []
    for scheme in ("light", "dark"):
        browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        colours.append(browser.run("getComputedStyle(document.body).backgroundColor"))
    assert len(set(colours)) == 2


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_lies_outside(browser, width):
    """Every button is inside of the part of the page that it belongs to, and conversations come before settings."""
    browser.call("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=False)
    browser.wait("document.querySelectorAll('nav li button').length >= 2")
    outside = (
        "[...document.querySelectorAll('button, input, textarea')].filter(one => {"
        " const own = one.getBoundingClientRect(), part = one.closest('nav, main, aside').getBoundingClientRect();"
        " return own.left < part.left || own.right > part.right }).map(one => one.ariaLabel || one.id)"
    )
    assert browser.run(outside) == []
    assert browser.run("document.documentElement.scrollWidth") <= width
    if width < 960:
        top = "document.querySelector('{}').getBoundingClientRect().top"
        order = [browser.run(top.format(part)) for part in ("main", "nav", "aside")]
        assert order == sorted(order)
