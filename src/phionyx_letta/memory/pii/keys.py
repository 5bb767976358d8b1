"""Keys of providers, known by the prefixes they give them (from each provider's documentation), tokens and private keys."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from phionyx_letta.memory.pii.findings import Finding

_B62 = "[A-Za-z0-9]"
_URL64 = "[A-Za-z0-9_-]"
_HEX = "[0-9a-f]"

# Alternatives begin with a literal, which keeps the search quick. Lengths are the documented ones or a little less.
_PREFIXED = (
    rf"(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{{16}}(?!{_B62})",  # AWS key ids
    r"ABSK[A-Za-z0-9+/]{100,140}={0,2}",  # AWS Bedrock
    rf"gh[pousr]_{_B62}{{30,255}}",  # GitHub
    r"github_pat_\w{60,255}",
    rf"v1\.{_HEX}{{40}}(?!{_B62})",
    rf"gl(?:pat|dt|rt|rtr|cbt|ptt|ft|soat|agent|ffct|imt|oas)-{_URL64}{{20,300}}(?:\.[0-9a-z.]{{2,20}})?",  # GitLab
    rf"GR1348941{_URL64}{{20,30}}",
    rf"sk-ant-{_URL64}{{20,250}}",  # Anthropic
    rf"sk-let-{_URL64}{{20,200}}",  # Letta
    rf"sk-or-(?:v1-)?{_B62}{{32,128}}",  # OpenRouter
    rf"sk-(?:proj|svcacct|admin|None)-{_URL64}{{20,250}}",  # OpenAI
    rf"[ps]k-lf-{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",  # Langfuse
    rf"sk-{_URL64}{{20,250}}",  # OpenAI, DeepSeek and others
    r"xox[abeoprs](?:\.xox[bp])?-[A-Za-z0-9-]{10,250}",  # Slack
    r"xapp-\d-[A-Za-z0-9-]{20,200}",
    r"xwfp-[A-Za-z0-9-]{20,200}",
    rf"[rs]k_(?:live|test|prod)_{_B62}{{16,250}}",  # Stripe, Clerk, Paystack
    rf"pk_live_{_B62}{{16,250}}",
    r"whsec_[A-Za-z0-9+/]{24,100}={0,2}",
    rf"AIza{_URL64}{{35}}",  # Google
    rf"GOCSPX-{_URL64}{{20,40}}",
    rf"ya29\.{_URL64}{{20,500}}",
    rf"1//0{_URL64}{{30,150}}",
    rf"hf_{_B62}{{30,60}}",  # Hugging Face
    rf"api_org_{_B62}{{30,60}}",
    rf"npm_{_B62}{{36}}",  # npm
    rf"pypi-AgE{_URL64}{{40,500}}",  # PyPI
    rf"pypi-{_URL64}{{80,500}}",
    rf"rubygems_{_HEX}{{48}}",
    rf"cio[A-Za-z0-9]{{32}}(?!{_B62})",  # crates.io
    rf"dckr_(?:pat|oat)_{_URL64}{{20,60}}",  # Docker
    rf"SG\.{_URL64}{{16,32}}\.{_URL64}{{32,64}}",  # SendGrid
    rf"key-{_HEX}{{32}}",  # Mailgun
    rf"{_HEX}{{32}}-us\d{{1,2}}",  # Mailchimp
    rf"xkeysib-{_HEX}{{64}}-{_B62}{{16}}",  # Brevo
    rf"re_{_B62}{{6,12}}_{_B62}{{18,30}}",  # Resend
    rf"mlsn\.{_HEX}{{40,80}}",  # MailerSend
    rf"(?:AC|SK){_HEX}{{32}}(?!{_B62})",  # Twilio
    rf"do[opr]_v1_{_HEX}{{64}}",  # DigitalOcean
    r"shp(?:at|ca|pa|ss|ua)_[0-9a-fA-F]{32}",  # Shopify
    rf"sq0(?:atp|csp|idp)-{_URL64}{{20,60}}",  # Square
    rf"EAAA{_URL64}{{50,70}}",
    rf"EAA{_B62}{{80,300}}",  # Meta
    rf"\d{{8,10}}:AA{_URL64}{{32,33}}",  # Telegram
    rf"[MNO]{_URL64}{{23,27}}\.{_URL64}{{6}}\.{_URL64}{{27,40}}",  # Discord
    rf"(?:secret|ntn)_{_B62}{{40,60}}",  # Notion
    rf"lin_(?:api|oauth)_{_B62}{{32,64}}",  # Linear
    rf"dapi{_HEX}{{32}}(?:-\d)?",  # Databricks
    rf"hv[bsr]\.{_URL64}{{24,300}}",  # HashiCorp Vault
    rf"{_B62}{{14}}\.atlasv1\.[A-Za-z0-9_=-]{{60,70}}",  # Terraform Cloud
    r"dp\.(?:pt|st|ct|sa|scim|audit)\.[A-Za-z0-9._-]{40,80}",  # Doppler
    rf"PMAK-{_HEX}{{24}}-{_HEX}{{34}}",  # Postman
    r"NRAK-[A-Z0-9]{27}",  # New Relic
    rf"NR(?:II|JS|BR)-{_URL64}{{19,40}}",
    r"gl(?:sa|c)_[A-Za-z0-9+/=_]{32,400}",  # Grafana
    r"sntry[su]_[A-Za-z0-9+/=_]{40,400}",  # Sentry
    rf"gsk_{_B62}{{40,60}}",  # Groq
    rf"xai-{_B62}{{60,100}}",  # xAI
    rf"pplx-{_B62}{{40,60}}",  # Perplexity
    rf"r8_{_B62}{{37,40}}",  # Replicate
    rf"fw_{_B62}{{20,40}}",  # Fireworks
    rf"csk-{_B62}{{40,60}}",  # Cerebras
    rf"nvapi-{_URL64}{{50,80}}",  # NVIDIA
    rf"tgp_v1_{_URL64}{{40,60}}",  # Together
    rf"pa-{_URL64}{{40,60}}",  # Voyage
    rf"jina_{_B62}{{40,80}}",  # Jina
    rf"fc-{_HEX}{{32}}",  # Firecrawl
    rf"tvly-{_URL64}{{20,60}}",  # Tavily
    rf"lsv2_(?:pt|sk)_{_HEX}{{32}}_{_HEX}{{10}}",  # LangSmith
    rf"e2b_{_HEX}{{40}}",  # E2B
    rf"pcsk_{_URL64}{{40,90}}",  # Pinecone
    rf"sk_{_HEX}{{48}}",  # ElevenLabs
    rf"sb[pv]_{_HEX}{{40}}",  # Supabase
    rf"sb_secret_{_URL64}{{20,60}}",
    rf"vc[paikrs]_{_B62}{{24,80}}",  # Vercel
    rf"nfp_{_B62}{{36,40}}",  # Netlify
    rf"fo1_{_URL64}{{40,60}}",  # Fly.io
    r"FlyV1 fm[12][ar]?_[A-Za-z0-9+/=]{40,500}",
    rf"HRKU-{_URL64}{{36,70}}",  # Heroku
    rf"rnd_{_B62}{{24,40}}",  # Render
    r"pscale_(?:tkn|pw|oauth)_[A-Za-z0-9_.-]{32,64}",  # PlanetScale
    rf"napi_{_B62}{{60,80}}",  # Neon
    rf"pat{_B62}{{14}}\.{_HEX}{{64}}",  # Airtable
    rf"AT(?:ATT|CTT)3{_URL64}{{60,250}}(?:=[0-9A-F]{{8}})?",  # Atlassian
    rf"ATBB{_B62}{{32}}",  # Bitbucket
    rf"sl\.(?:u\.)?{_URL64}{{60,1500}}",  # Dropbox
    rf"fig[dou]_{_URL64}{{36,60}}",  # Figma
    r"AGE-SECRET-KEY-1[A-Z0-9]{58}",  # age
    rf"tskey-(?:auth|api|client|scim|webhook)-{_B62}{{10,20}}-{_B62}{{20,40}}",  # Tailscale
    r"ops_eyJ[A-Za-z0-9+/=_-]{100,2000}",  # 1Password
    r"A3-[A-Z0-9]{6}-[A-Z0-9]{6,11}-[A-Z0-9]{5}-[A-Z0-9]{5}-[A-Z0-9]{5}",
    rf"bkua_{_HEX}{{40}}",  # Buildkite
    rf"CCIPAT_{_B62}{{20,30}}_{_HEX}{{40}}",  # CircleCI
    rf"CFPAT-{_URL64}{{43}}",  # Contentful
    r"oy2[a-z0-9]{43}",  # NuGet
    rf"LTAI{_B62}{{16,24}}(?!{_B62})",  # Alibaba
    rf"AKID{_B62}{{32}}(?!{_B62})",  # Tencent
    rf"(?:AQVN|YCA){_URL64}{{35,50}}",  # Yandex
    rf"aio_{_B62}{{28}}",  # Adafruit
    rf"EZ[AT]K{_B62}{{54}}",  # EasyPost
    rf"duffel_(?:live|test)_{_URL64}{{43}}",
    rf"FLWSECK(?:_TEST)?-{_B62}{{12,40}}(?:-X)?",  # Flutterwave
    rf"rzp_(?:live|test)_{_B62}{{14,20}}",  # Razorpay
    rf"access-(?:production|development|sandbox)-{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",  # Plaid
    rf"pnu_{_B62}{{36}}",  # Prefect
    rf"pul-{_HEX}{{40}}",  # Pulumi
    r"rdme_[a-z0-9]{70}",  # ReadMe
    rf"shippo_(?:live|test)_{_HEX}{{40}}",
    r"tfp_[A-Za-z0-9_.-]{40,80}",  # Typeform
    rf"AKCp{_B62}{{60,80}}",  # JFrog
    r"dt0[a-z]\d\d\.[A-Z0-9]{24}\.[A-Z0-9]{64}",  # Dynatrace
    rf"sk\.eyJ{_URL64}{{40,200}}\.{_URL64}{{20,40}}",  # Mapbox
    r"[A-Za-z0-9_~.-]{3}\dQ~[A-Za-z0-9_~.-]{31,34}",  # Microsoft Entra client secrets
    rf"phx_{_B62}{{36,60}}",  # PostHog
    rf"v1\.0-{_HEX}{{24}}-{_HEX}{{146}}",  # Cloudflare origin CA
    rf"SCW{_B62}{{17}}(?!{_B62})",  # Scaleway
    rf"lk_{_B62}{{30,60}}",
    rf"ctx7sk-{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
)
# A token of such a key is long and unbroken, which most words of a text are not.
_KEY = re.compile(rf"(?<![A-Za-z0-9])(?=[A-Za-z0-9:_.~\-]{{15}}|1//0|FlyV1 )(?:{'|'.join(_PREFIXED)})")
_HOOKS = re.compile(
    r"https://(?:hooks\.slack\.com/(?:services|workflows|triggers)/[A-Za-z0-9/_-]{20,200}"
    r"|(?:\w{1,10}\.)?discord(?:app)?\.com/api/(?:v\d{1,2}/)?webhooks/\d{15,22}/[\w-]{40,100}"
    r"|[\w-]{1,63}\.webhook\.office\.com/webhookb2/[\w@/-]{40,250}"
    r"|hooks\.zapier\.com/hooks/catch/\d{4,12}/\w{5,20}"
    r"|chat\.googleapis\.com/v1/spaces/[\w-]{5,30}/messages\?key=[\w&=%.-]{20,250})"
)
_AZURE = re.compile(
    r"(?i:AccountKey|SharedAccessKey)=([A-Za-z0-9+/]{40,100}={0,2})|[?&]sig=([A-Za-z0-9%+/]{40,100}(?:=|%3D){0,2})"
)


def api_keys(text: str) -> Iterator[Finding]:
    """Yield keys with a provider's prefix, and addresses that are secrets in themselves (web hooks)."""
    for found in _KEY.finditer(text):
        if (found[0].isupper() and len(set(found[0])) > 6) or _random(found[0]):
            yield Finding("api_key", found.start(), found.end())
    if "https://" in text:
        for found in _HOOKS.finditer(text):
            yield Finding("api_key", found.start(), found.end())
    for found in _AZURE.finditer(text):
        yield Finding("api_key", *found.span(found.lastindex or 0))


_SEGMENT = re.compile(r"[A-Za-z0-9+/]+")


def _random(key: str) -> bool:
    """Tell a key from words joined by hyphens or underscores and from a row of x's: much of it is no word."""
    mixed = "".join(segment for segment in _SEGMENT.findall(key) if is_scrambled(segment))
    return len(mixed) >= 10 and len(set(mixed)) >= 6


def is_scrambled(word: str) -> bool:
    """Whether `word` mixes letters with digits, or capitals with small letters as names do not."""
    if len(word) < 4 or word.isdigit():
        return False
    if any(c.isdigit() for c in word):
        return True
    return sum(a.islower() != b.islower() for a, b in pairwise(word[1:])) >= 2


_JWT = re.compile(rf"(?<![A-Za-z0-9_-])eyJ{_URL64}{{8,4000}}+(?P<rest>(?:\.{_URL64}{{0,16000}}+){{1,4}})")


def jwts(text: str) -> Iterator[Finding]:
    """Yield JSON web tokens in compact form (RFC 7515, RFC 7516): a header that begins ``{"`` and two parts or more."""
    if "eyJ" in text:
        for found in _JWT.finditer(text):
            if len(found["rest"]) < 12:
                continue
            yield Finding("jwt", found.start(), found.end())


_BEGIN = re.compile(r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----")
_END = re.compile(r"-----END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----")
_ARMOUR = re.compile(
    r"(?:[A-Za-z0-9+/=]{16,}|[A-Za-z0-9+/=]{1,80}(?=\s|\\|$)|\\[nr]|[\s\"',+]|[A-Z][A-Za-z-]{1,30}: [^\n]{0,200}\n){0,2000}+"
)
_LONGEST_PEM = 20_000
_WORD = re.compile(r"(?:(?!\\[nr])\S)+")
_BASE64 = re.compile(r"[A-Za-z0-9+/=]+")
_PUTTY = re.compile(r"Private-Lines: \d{1,3}\s+(?:[A-Za-z0-9+/=]{1,64}\s?){1,200}")


def private_keys(text: str) -> Iterator[Finding]:
    """Yield private keys in PEM, OpenSSH and PGP armour (RFC 7468), whole, or as far as base64 goes where an end is cut off."""
    if "PRIVATE KEY" not in text and "Private-Lines:" not in text:
        return
    at = 0
    while found := _BEGIN.search(text, at):
        yield from _cut_at_the_top(text, at, found.start())
        limit = found.end() + _LONGEST_PEM
        end = _END.search(text, found.end(), limit)
        inner = _BEGIN.search(text, found.end(), end.start() if end else found.end() + 1)
        if end and not inner:
            at = end.end()
        else:
            armour = _ARMOUR.match(text, found.end(), limit)
            at = found.end() + len(armour[0].rstrip() if armour else "")
        yield Finding("private_key", found.start(), at)
    yield from _cut_at_the_top(text, at, len(text))
    for found in _PUTTY.finditer(text):
        yield Finding("private_key", found.start(), found.end())


def _cut_at_the_top(text: str, start: int, stop: int) -> Iterator[Finding]:
    """Yield what stands before an end line that has no begin line in ``text[start:stop]``."""
    while end := _END.search(text, start, stop):
        first = end.start()
        for word in reversed([*_WORD.finditer(text, max(start, end.start() - _LONGEST_PEM), end.start())]):
            if not _BASE64.fullmatch(word[0]) or (len(word[0]) < 16 and first != end.start()):
                break
            first = word.start()
        yield Finding("private_key", first, end.end())
        start = end.end()
