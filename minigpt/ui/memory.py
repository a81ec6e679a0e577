"""How a form outlives its page: the browser's half, as scripts of gradio's events. `form.py` has the other half, what a link and a file say.

The form is kept as the query of a link, beside the address that it was kept under: a new link wins over what was kept, a reload does not. A
browser may forbid its storage, as within a frame: then nothing is kept.
"""

_ADDRESS = "const address = () => { const query = new URLSearchParams(location.search); query.delete('run'); return String(query); };"
_KEEP = "const keep = (name, value) => { try { sessionStorage.setItem(`minigpt-${name}`, JSON.stringify(value)); } catch { } };"
_KEPT = "const kept = name => { try { return JSON.parse(sessionStorage.getItem(`minigpt-${name}`)); } catch { return null; } };"

ARRIVE = (
    "(_, ...text) => {"
    + _ADDRESS
    + _KEPT
    + """
    const [where, form] = kept('form') ?? ['', ''];
    return [address() === where ? form : '?' + address(), ...(kept('text') ?? text)];
}"""
)
REMEMBER = "form => {" + _ADDRESS + _KEEP + "keep('form', [address(), form]); }"
REMEMBER_TEXT = "(...text) => {" + _KEEP + "keep('text', text); }"
# Into the address bar always, into the clipboard where the browser lets it.
COPY_LINK = (
    "async form => {"
    + _ADDRESS
    + _KEEP
    + """
    const query = new URLSearchParams(form), { run } = window.minigpt.view;
    if (run !== 'example') query.set('run', run);
    history.replaceState(null, '', `?${query}`);
    keep('form', [address(), form]);
    try { await navigator.clipboard.writeText(location.href); return 'Copied'; } catch { return 'It is in the address bar'; }
}"""
)
DOWNLOAD = "text => window.minigpt.download('minigpt-settings.json', text)"
