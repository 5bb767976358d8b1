"""Generates ``pii_generated.json``: cases of every kind by rule, positives and look-alikes, from a fixed seed.

The rules here are written from the formats' own definitions (check digits, registries, the providers' documentation), not
from the filter's patterns. Run it to write the file again: ``python tests/data/generate_pii_cases.py``.
"""

from __future__ import annotations

import base64
import hashlib
import json
import random
import string
import uuid
from pathlib import Path

R = random.Random(20_26_11)
B62 = string.ascii_letters + string.digits
URL64 = B62 + "-_"
HEX = "0123456789abcdef"


def chars(alphabet, length):
    while True:
        text = "".join(R.choice(alphabet) for _ in range(length))
        if text[-1] not in "-_" and text[0] not in "-_":
            return text


def digits(length):
    return chars(string.digits, length)


CASES: list[tuple[str, str, str | None]] = []


def positive(kind, value, *sentences):
    for sentence in sentences:
        CASES.append((kind, sentence.replace("{}", value), value))


def negative(kind, *texts):
    CASES.extend((kind, text, None) for text in texts)


# --- e-mail
NAMES = [
    "ada.lovelace",
    "j.doe",
    "mehmet_yilmaz",
    "support+eu",
    "x",
    "anna-maria",
    "r2d2",
    "O'Hara",
    "sales.team.emea",
    "ümit.şahin",
    "jürgen",
    "françois",
    "søren",
    "иван.петров",
    "李雷",
    "δημήτρης",
    "n.o.reply99",
    "first_last",
    "UPPER.CASE",
    "a1b2c3",
]
DOMAINS = [
    "example.org",
    "mail.example.co.uk",
    "startup.io",
    "firma.com.tr",
    "uni-bonn.de",
    "müller-söhne.de",
    "пример.рф",
    "例子.中国",
    "παράδειγμα.ελ",
    "xn--mnchen-3ya.de",
    "sub.sub2.corp.net",
    "company.technology",
    "agency.gov.au",
    "data.ai",
    "café.fr",
]
WRAPS = [
    "my mail: {}",
    "Please cc {} on that.",
    "<{}>",
    "({})",
    "the user's address is {}, use it",
    "user={}",
    '"{}"',
    "{} wrote:",
    "mailto:{}",
    "| name | {} |",
    "to:{};",
    "- **{}**",
    "Contact {}!",
    "from {} to nobody",
    "e-mail\t{}",
]
for name in NAMES:
    for domain in R.sample(DOMAINS, 4):
        positive("email", f"{name}@{domain}", R.choice(WRAPS))
for value in [
    "ada [at] corp [dot] com",
    "ada(at)corp.com",
    "ada at corp dot com",
    "john.doe (at) uni-bonn (dot) de",
    "ada[at]corp[dot]org",
    "ada＠corp．com",
    "ada@corp\u200b.com",
    "a\u00adda@corp.com",
    "ada%40corp.com",
    "ada&#64;corp.com",
    "ada {at} corp {dot} net",
]:
    positive("email", value, "write me: {}", "my address is {} ok")
negative(
    "email",
    "decorate with @dataclass(frozen=True)",
    "npm install @scope/pkg@3.2.1",
    "git@gitlab.example.com:team/app.git",
    "ssh deploy@build.example.com",
    "scp file.txt root@web01.example.com:/tmp",
    "y = W@x.T",
    "scores = q@k.transpose(-2, -1)",
    "a@b",
    "user@localhost",
    "logo@2x.png",
    "icon@3x.webp",
    "image repo/app@sha256:9f86d081884c7d659a2feaa0c55ad015",
    "@alice can you review?",
    "ping @bob and @carol.",
    "10 items @ 5 each",
    "lodash@latest",
    "uses: actions/checkout@v4.1.2",
    "we meet at noon at the office",
    "look at the dot in the middle",
    "cron runs @daily",
    "@media (max-width: 600px)",
    "foo@1.0.0-beta.2",
    "postgres@db",
    "package@^1.2.3",
    "http://localhost:3000/@vite/client",
    "the @property decorator",
    "SELECT @@version",
    "$@ expands to all arguments",
    "T@M",
    "rsync -a ./ build@ci.example.net:/srv",
)

# --- phones: (region's way of writing)
PHONES = [
    "+44 7700 900123",
    "+44 (0)20 7946 0018",
    "+49 151 23456789",
    "+49-89-636-48018",
    "+33 6 12 34 56 78",
    "+34 612 34 56 78",
    "+39 06 6982 1234",
    "+31 6 12345678",
    "+46 70 123 45 67",
    "+47 406 12 345",
    "+45 32 12 34 56",
    "+358 40 123 4567",
    "+48 512 345 678",
    "+420 601 123 456",
    "+43 664 1234567",
    "+41 79 123 45 67",
    "+32 470 12 34 56",
    "+351 912 345 678",
    "+30 691 234 5678",
    "+90 (532) 123 45 67",
    "+90-212-393-2000",
    "+7 912 345-67-89",
    "+380 50 123 4567",
    "+86 131 2345 6789",
    "+852 5123 4567",
    "+886 912 345 678",
    "+82 10-2000-0000",
    "+81 90-1234-5678",
    "+65 8123 4567",
    "+60 12-345 6789",
    "+62 812-345-678",
    "+66 81 234 5678",
    "+84 912 345 678",
    "+63 905 123 4567",
    "+91 81234 56789",
    "+92 301 2345678",
    "+61 412 345 678",
    "+64 21 123 4567",
    "+27 71 123 4567",
    "+234 802 123 4567",
    "+254 712 123456",
    "+20 100 123 4567",
    "+212 650-123456",
    "+971 50 123 4567",
    "+966 51 234 5678",
    "+972 50-234-5678",
    "+52 55 1234 5678",
    "+55 21 98765-4321",
    "+54 9 11 2345-6789",
    "+56 2 2123 4567",
    "+57 321 1234567",
    "+1 (212) 555-0187",
    "+1-604-555-0199",
    "+1.416.555.0123",
    "+14155550132",
    "+4915123456789",
    "+905321234567",
    "0044 20 7946 0018",
    "0049 89 63648018",
    "011 44 20 7946 0018",
]
for value in PHONES:
    positive(
        "phone",
        value,
        R.choice(
            [
                "reach her on {}",
                "{} is his number",
                "tel:{}",
                "call {} tomorrow",
                "WhatsApp {}",
                "office: {}",
                "({}) after five",
            ]
        ),
    )
for value in [
    "(212) 555-0187",
    "212-555-0187",
    "212.555.0187",
    "(650)253-0000",
    "1-800-555-0199",
    "650 253 0000",
    "1 (415) 555-0132",
    "415–555–0132",
    "415‑555‑0132",
]:
    positive("phone", value, "call {} now", "{} is the office", "her cell: {}")
for value in [
    "2125550187",
    "07700 900123",
    "020 7946 0018",
    "0151 23456789",
    "06 12 34 56 78",
    "0532 123 45 67",
    "0 532 123 45 67",
    "(0212) 393 20 00",
    "98765 43210",
    "090-1234-5678",
    "03-1234-5678",
    "(11) 98765-4321",
    "٠٥٣٢ ١٢٣ ٤٥ ٦٧",
    "０３-１２３４-５６７８",
    "089/63648018",
    "01.42.68.53.00",
]:
    positive("phone", value, "tel: {}", "my number is {}", "please phone {} first")
for value in [
    "020 7946 0018",
    "07700 900 123",
    "06 12 34 56 78",
    "01 42 68 53 00",
    "0532 123 45 67",
    "090-1234-5678",
    "(11) 98765-4321",
]:
    positive("phone", value, "{}", "for questions: {}")
positive("phone", "555-0187", "call 555-0187 for pizza", "phone: 555-0187")
positive("phone", "650-253-0000 x123", "call 650-253-0000 x123 and ask")
negative(
    "phone",
    "order 2125550187",
    "invoice no. 0049 8963 6480",
    "ticket #4155550132",
    "tracking number 9400 1000 0000 0000 0000 00",
    "SKU 415-555-01327",
    "serial 0532-1234-5678-99",
    "released 2026-11-30 12:45",
    "from 2019-2023 and 2024-2026",
    "30.11.2026 17:45",
    "11/30/2026",
    "version 4.15.555",
    "lines 1200-1350",
    "pages 100-200",
    "10 000 000 users",
    "1 234 567 rows",
    "range 1000000-2000000",
    "ISBN 978-0-13-468599-1",
    "ISSN 0317-8471",
    "EAN 4006381333931",
    "job 20261130-0042",
    "id 1234567890",
    "epoch 1764467303",
    "0x7fffffff",
    "timeout=30000000",
    "3.14159265",
    "1e9+7",
    "100-200-3000 steps",
    "score 21-15 21-18 21-19",
    "card holder since 2015",
    "seed 4294967295",
    "PR 12345678",
    "error 0300 1234",
    "chapter 12 34 56 78",
    "coordinates 52.520008, 13.404954",
    "52.5200 13.4049",
    "resolution 1920 1080 2560 1440",
    "192.168.0.0/24",
    "2026 11 30 17 45",
    "+1 -1 +2",
    "C++ 2011 2014 2017",
    "UTC+03:00",
    "a+b = 12345678",
    "file_20261130_174512.log",
    "PID 1234567",
    "port 8283 8284 8285",
    "DOI 10.1000/182",
    "call center open 24/7",
    "called 1000000 times",
    "the phone has 128 256 512 GB options",
    "$1,234,567.89",
    "123 456 789",
    "rate 1000 2000 3000",
    "1-2-3-4-5-6-7",
    "batch 0012345678",
    "0.1234567890",
    "mod 1000000007",
    "sum is 8589934592 bytes",
    "build 2024.11.30.1234",
)

# --- social security numbers
for _ in range(24):
    area = R.choice([R.randint(1, 665), R.randint(667, 899)])
    area, group, serial = f"{area:03d}", f"{R.randint(1, 99):02d}", f"{R.randint(1, 9999):04d}"
    positive(
        "ssn",
        f"{area}-{group}-{serial}",
        R.choice(
            [
                "SSN {}",
                "{} is her social",
                "his social security number is {}.",
                "on file: {}",
                "ssn={}",
                "Social Security #: {}",
            ]
        ),
    )
    positive(
        "ssn",
        R.choice([f"{area} {group} {serial}", f"{area}{group}{serial}", f"{area}–{group}–{serial}"]),
        R.choice(["SSN: {}", "social security number {}", "my ssn is {}", "ssn#{}"]),
    )
negative(
    "ssn",
    "000-12-3456",
    "666-12-3456",
    "123-00-4567",
    "123-45-0000",
    "part no 123-45-67890",
    "SKU 123-45-6789",
    "order 219-09-9999",
    "zip 12345-6789",
    "123456789",
    "987654321 rows",
    "id 536228726",
    "2026-11-30",
    "1-23-4567",
    "12-345-6789",
    "case 900-12-3456",
    "ratio 100 20 3000",
    "536-22-87260",
    "A536-22-8726",
    "uuid 123-45-6789-abcd",
)


# --- cards
def luhn(prefix, length):
    body = prefix + "".join(R.choice(string.digits) for _ in range(length - len(prefix) - 1))
    total = 0
    for place, c in enumerate(reversed(body)):
        n = int(c) * (2 if place % 2 == 0 else 1)
        total += n - 9 if n > 9 else n
    return body + str(-total % 10)


def grouped(number, sizes, separator):
    parts, at = [], 0
    for size in sizes:
        parts.append(number[at : at + size])
        at += size
    return separator.join(parts)


for prefix, length, sizes in [
    ("4", 16, (4,) * 4),
    ("51", 16, (4,) * 4),
    ("55", 16, (4,) * 4),
    ("2221", 16, (4,) * 4),
    ("2720", 16, (4,) * 4),
    ("34", 15, (4, 6, 5)),
    ("37", 15, (4, 6, 5)),
    ("6011", 16, (4,) * 4),
    ("65", 16, (4,) * 4),
    ("3528", 16, (4,) * 4),
    ("3589", 16, (4,) * 4),
    ("36", 14, (4, 6, 4)),
    ("6759", 16, (4,) * 4),
    ("62", 16, (4,) * 4),
    ("2200", 16, (4,) * 4),
    ("9792", 16, (4,) * 4),
    ("4", 19, (4, 4, 4, 4, 3)),
]:
    for _ in range(2):
        number = luhn(prefix, length)
        positive("card", number, R.choice(["card {}", "pay with {} please", "cc={}", "{} exp 12/27", "PAN: {}"]))
        positive(
            "card",
            grouped(number, sizes, R.choice([" ", "-", "\u00a0"])),
            R.choice(["{}", "visa/mc {}", "my card is {}, cvv 123", "card number: {}", '"{}" 12/27', "{} 12/27 123"]),
        )
bad = luhn("4", 16)
negative(
    "card",
    "row " + bad[:-1] + str((int(bad[-1]) + 1) % 10),
    "order 1234567890123456",
    "tracking 9400100000000000000000",
    "IMEI 490154203237518",
    "1764467303123",
    "1764467303123456",
    "20261130174512123",
    "ref 9999 8888 7777 6666",
    "GTIN 4006381333931",
    "0000000000000000",
    "isbn 9780134685991",
    "x = 4111111111111112",
    "id: 5555555555554445",
    "12345678901234567890",
    "0.4111111111111111",
    "4111111111111111234567",
    "hash 4111111111111111a",
    "1000 2000 3000 4000",
    "7000000000000000",
    "2048 4096 8192 16384",
    "bigint 9223372036854775807",
    "uuid 41111111-1111-4111-8111-111111111111",
)


# --- IBANs, from ISO 13616 structures
def iban(country, bban):
    text = bban + country + "00"
    number = int("".join(str(int(c, 36)) for c in text))
    return f"{country}{98 - number % 97:02d}{bban}"


UP = string.ascii_uppercase
IBANS = [
    iban("DE", digits(18)),
    iban("FR", digits(10) + chars(UP + string.digits, 11) + digits(2)),
    iban("GB", chars(UP, 4) + digits(14)),
    iban("NL", chars(UP, 4) + digits(10)),
    iban("ES", digits(20)),
    iban("IT", chars(UP, 1) + digits(10) + chars(UP + string.digits, 12)),
    iban("TR", digits(5) + "0" + chars(UP + string.digits, 16)),
    iban("BE", digits(12)),
    iban("AT", digits(16)),
    iban("CH", digits(5) + chars(UP + string.digits, 12)),
    iban("PL", digits(24)),
    iban("SE", digits(20)),
    iban("NO", digits(11)),
    iban("DK", digits(14)),
    iban("FI", digits(14)),
    iban("PT", digits(21)),
    iban("GR", digits(7) + chars(UP + string.digits, 16)),
    iban("IE", chars(UP, 4) + digits(14)),
    iban("SA", digits(2) + chars(UP + string.digits, 18)),
    iban("BR", digits(23) + "P1"),
    iban("MT", chars(UP, 4) + digits(5) + chars(UP + string.digits, 18)),
    iban("LU", digits(3) + chars(UP + string.digits, 13)),
    iban("UA", digits(6) + chars(UP + string.digits, 19)),
]
for value in IBANS:
    positive("iban", value, R.choice(["IBAN {}", "transfer to {} today", "{}", "iban={}", "account: {}."]))
    positive("iban", grouped(value, (4,) * 9, " ").strip(), R.choice(["IBAN: {}", "my account is {} thanks", "({})"]))
positive("iban", IBANS[0].lower(), "iban {}")
positive("iban", grouped(IBANS[1], (4,) * 9, "-").strip("-"), "iban {}")
negative(
    "iban",
    "IBAN DE00370400440532013000",
    "GB29 NWBK 6016 1331 9268 20",
    "code AB12CDEF34567890",
    "US64SVBKUS6S3300958879",
    "FR2024 roadmap for Q3",
    "MT19937 generator",
    "TR330006100519786457841327",
    "part GB82WEST12345698765433",
    "BE SURE to use IS9001",
    "license XX82 WEST 1234 5698 7654 32",
    "DE89 is a road",
)

# --- IP addresses
for _ in range(20):
    value = f"{R.choice([5, 23, 52, 81, 104, 142, 185, 198, 203])}.{R.randint(0, 255)}.{R.randint(0, 255)}.{R.randint(1, 254)}"
    positive(
        "ip",
        value,
        R.choice(
            [
                "logged in from {}",
                "host {}:8080",
                "http://{}/admin",
                "ssh root@{}",
                "client_ip={}",
                "A record -> {}",
                "{} - - [30/Nov/2026]",
                "banned {} for abuse",
                'ip: "{}"',
                "{}, {}".replace("{}", value, 1),
            ]
        ),
    )
for value in [
    "2001:db8::ff00:42:8329",
    "2001:0db8:0000:0000:0000:ff00:0042:8329",
    "2a00:1450:4001:81b::200e",
    "fe80::1ff:fe23:4567:890a",
    "2606:4700:4700::1001",
    "2a03:2880:f12f:83:face:b00c:0:25de",
    "::ffff:203.0.113.9",
    "2001:db8:1:2:3:4:5:6",
    "2620:fe::fe",
    "2001:DB8:0:0:8:800:200C:417A",
    "2a02:8109::1",
    "64:ff9b::203.0.113.33",
]:
    positive("ip", value, "from {} yesterday", "http://[{}]:8283/", "ip={}")
negative(
    "ip",
    "Python 3.11.7.1",
    "version 10.2.3.4",
    "release 1.0.0.12",
    "libssl 1.1.1.1 version",
    "bumped numpy from 1.2.3.4 to 1.2.3.5",
    "firmware 2.14.0.3",
    "v1.2.3.4",
    "foo==1.2.3.4",
    "foo>=4.3.2.1",
    "Chrome/120.0.0.0",
    "section 3.2.1.4",
    "OID 1.3.6.1.4.1.311",
    "999.1.1.1",
    "256.256.256.256",
    "10.0.0.0/8",
    "172.16.0.0/12",
    "fe80::/10",
    "2001:db8::/32",
    "127.0.0.1",
    "127.0.1.1",
    "0.0.0.0/0",
    "255.255.255.255",
    "255.255.0.0",
    "224.0.0.1 multicast",
    "::",
    "::1",
    "std::chrono::seconds",
    "Foo::Bar::baz",
    "12:34:56",
    "00:1A:2B:3C:4D:5E",
    "a[1::2]",
    "x[::-1]",
    "use crate::abc::def",
    "00:11:22:33:44:55:66:77",
    "1:2:3",
    "10:20:30.5",
    "sha1 a9:4a:8f:e5:cc:b1:9b:a6:1c:4c:08:73:d3:91:e9:87",
    "ratio 16:9",
    "1.2.3.4.5",
    "package-1.2.3.4.tar.gz",
    "localhost ::1 port 80",
    "face::",
    "dll 6.1.7601.17514",
    "ff02::1",
)

# --- keys of providers, from their documentation of the formats
KEYS = {
    "aws": ["AKIA" + chars(UP + "234567", 16), "ASIA" + chars(UP + "234567", 16)],
    "github": [
        "ghp_" + chars(B62, 36),
        "gho_" + chars(B62, 36),
        "ghu_" + chars(B62, 36),
        "ghs_" + chars(B62, 36),
        "ghr_" + chars(B62, 36),
        "github_pat_" + chars(B62, 22) + "_" + chars(B62, 59),
    ],
    "gitlab": [
        "glpat-" + chars(URL64, 20),
        "gldt-" + chars(URL64, 20),
        "glrt-" + chars(URL64, 20),
        "glptt-" + chars(HEX, 40),
    ],
    "openai": [
        "sk-" + chars(B62, 48),
        "sk-proj-" + chars(URL64, 120),
        "sk-svcacct-" + chars(URL64, 80),
        "sk-admin-" + chars(URL64, 80),
    ],
    "anthropic": ["sk-ant-api03-" + chars(URL64, 93) + "AA", "sk-ant-admin01-" + chars(URL64, 93) + "AA"],
    "letta": ["sk-let-" + chars(B62, 64)],
    "openrouter": ["sk-or-v1-" + chars(HEX, 64)],
    "slack": [
        f"xoxb-{digits(12)}-{digits(13)}-{chars(B62, 24)}",
        f"xoxp-{digits(12)}-{digits(12)}-{digits(13)}-{chars(HEX, 32)}",
        f"xapp-1-A{chars(UP + string.digits, 10)}-{digits(13)}-{chars(HEX, 64)}",
        f"https://hooks.slack.com/services/T{chars(UP + string.digits, 8)}/B{chars(UP + string.digits, 10)}/{chars(B62, 24)}",
    ],
    "stripe": [
        "sk_live_" + chars(B62, 24),
        "rk_live_" + chars(B62, 24),
        "sk_test_" + chars(B62, 99),
        "whsec_" + chars(B62, 32),
    ],
    "google": [
        "AIza" + chars(URL64, 35),
        "GOCSPX-" + chars(URL64, 28),
        "ya29." + chars(URL64, 120),
        "1//0" + chars(URL64, 60),
    ],
    "hf": ["hf_" + chars(string.ascii_letters, 34)],
    "npm": ["npm_" + chars(B62, 36)],
    "pypi": ["pypi-AgEIcHlwaS5vcmc" + chars(URL64, 150)],
    "sendgrid": [f"SG.{chars(URL64, 22)}.{chars(URL64, 43)}"],
    "twilio": ["SK" + chars(HEX, 32), "AC" + chars(HEX, 32)],
    "mailgun": ["key-" + chars(HEX, 32)],
    "mailchimp": [chars(HEX, 32) + "-us19"],
    "digitalocean": ["dop_v1_" + chars(HEX, 64)],
    "shopify": ["shpat_" + chars(HEX, 32), "shpss_" + chars(HEX, 32)],
    "telegram": [f"{digits(10)}:AA{chars(URL64, 33)}"],
    "discord": [
        f"M{chars(B62, 25)}.{chars(URL64, 6)}.{chars(URL64, 38)}",
        f"https://discord.com/api/webhooks/{digits(18)}/{chars(URL64, 68)}",
    ],
    "notion": ["ntn_" + chars(B62, 46), "secret_" + chars(B62, 43)],
    "linear": ["lin_api_" + chars(B62, 40)],
    "databricks": ["dapi" + chars(HEX, 32)],
    "vault": ["hvs." + chars(URL64, 90)],
    "postman": [f"PMAK-{chars(HEX, 24)}-{chars(HEX, 34)}"],
    "newrelic": ["NRAK-" + chars(UP + string.digits, 27)],
    "grafana": ["glsa_" + chars(B62, 32) + "_" + chars(HEX, 8)],
    "groq": ["gsk_" + chars(B62, 52)],
    "xai": ["xai-" + chars(B62, 80)],
    "replicate": ["r8_" + chars(B62, 37)],
    "docker": ["dckr_pat_" + chars(URL64, 27)],
    "tailscale": [f"tskey-auth-{chars(B62, 12)}-{chars(B62, 32)}"],
    "supabase": ["sbp_" + chars(HEX, 40)],
    "airtable": [f"pat{chars(B62, 14)}.{chars(HEX, 64)}"],
    "atlassian": ["ATATT3" + chars(URL64, 180) + "=" + chars("0123456789ABCDEF", 8)],
    "figma": ["figd_" + chars(URL64, 40)],
    "azure": [f"{chars(B62, 3)}8Q~{chars(B62, 34)}"],
    "langsmith": [f"lsv2_pt_{chars(HEX, 32)}_{chars(HEX, 10)}"],
    "pinecone": ["pcsk_" + chars(B62, 6) + "_" + chars(B62, 63)],
    "rubygems": ["rubygems_" + chars(HEX, 48)],
    "square": ["sq0atp-" + chars(URL64, 22)],
    "doppler": ["dp.pt." + chars(B62, 43)],
    "age": ["AGE-SECRET-KEY-1" + chars(UP + string.digits, 58)],
}
KEY_WRAPS = [
    "key {}",
    "export TOKEN={}",
    '"api_key": "{}",',
    "use `{}` for the build",
    "it is {}.",
    "({})",
    "Authorization: Bearer {}",
    "curl -H 'X-Api-Key: {}' https://x",
    "token={}&x=1",
    "here: {}\nthanks",
    "{}",
]
for kind, values in KEYS.items():
    for value in values:
        for wrap in R.sample(KEY_WRAPS, 2):
            positive(kind, value, wrap)
for _ in range(6):
    positive("named secret", chars(B62 + "/+", 39) + "Z", "aws_secret_access_key={}", "AWS_SECRET_ACCESS_KEY: {}")
    positive(
        "named secret",
        chars(B62, 32),
        'api_key = "{}"',
        "client_secret={}",
        "MISTRAL_API_KEY={}",
        "the api key is {}",
        '"secret": "{}"',
    )
    positive("named secret", chars(HEX, 40), "WANDB_API_KEY={}", "access_token: {}", "Authorization: Bearer {}")
    positive("named secret", str(uuid.UUID(int=R.getrandbits(128), version=4)), "HEROKU_API_KEY={}")
    positive(
        "named secret",
        base64.b64encode(R.randbytes(64)).decode(),
        "DefaultEndpointsProtocol=https;AccountName=x;AccountKey={};EndpointSuffix=core.windows.net",
    )
negative(
    "api key",
    "sk-...",
    "OPENAI_API_KEY=sk-xxxxxxxxxxxxxxxxxxxxxxxx",
    "sk-your-api-key-goes-here-please",
    "ghp_xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx",
    'api_key = os.environ["API_KEY"]',
    "api_key: ${API_KEY}",
    "api_key=settings.openai_api_key",
    "token = tokenizer.encode_plus_with_special_tokens(text)",
    "secret_key_base_for_development_environment",
    "token: <your token here>",
    "AKIA is the prefix of AWS key ids",
    "the token limit is 128000",
    "max_tokens=4096",
    "token_type_ids and attention_mask",
    "sk-learn-compatible-estimator-wrapper-class",
    "secret santa is on 2026-12-20",
    "set the api key in the settings page",
    "API_KEY_ROTATION_INTERVAL_IN_DAYS=90",
    "key-value-store-with-persistent-backend",
    "hf_transfer_enabled_for_large_downloads",
    "npm_config_registry_for_internal_packages",
    "pypi-package-name-with-many-hyphens",
    "keyboard-interrupt-handler-registered",
    "SGD.optimizer.state_dict_with_momentum_buffer",
    "use the access token from the vault",
    "bearer token authentication is required",
    "AC adapter 12345678901234567890",
    "glpat is GitLab's prefix",
    "id_token_signing_alg_values_supported",
    "token: projects/my-project/secrets/db/versions/latest",
    "rk_live and sk_live are prefixes",
    "ya29 is a prefix",
    "xoxb-your-token",
    "secret=k8s-secret-name-for-database",
    "session_token_expiry_seconds=3600",
    "sha512-" + base64.b64encode(hashlib.sha512(b"x").digest()).decode(),
    "integrity sha256-" + base64.b64encode(hashlib.sha256(b"x").digest()).decode(),
)
for _ in range(12):
    negative(
        "uuid",
        f"id {uuid.UUID(int=R.getrandbits(128), version=4)}",
        f"agent-{uuid.UUID(int=R.getrandbits(128), version=4)}",
        f"trace {chars(HEX, 32)}",
        f"run-{uuid.UUID(int=R.getrandbits(128), version=4)} finished",
    )
    negative(
        "hash",
        f"commit {chars(HEX, 40)}",
        f"sha256:{chars(HEX, 64)}",
        f"md5 {chars(HEX, 32)}",
        f"digest {chars(HEX, 128)}",
        f'etag "{chars(HEX, 32)}"',
        f"git show {chars(HEX, 7)}",
    )
    negative(
        "order number",
        f"order {digits(R.randint(6, 14))}",
        f"invoice {R.randint(2020, 2026)}-{digits(5)}",
        f"ticket ABC-{digits(4)}",
        f"tracking 1Z{chars(UP + string.digits, 16)}",
        f"case #{digits(9)}",
        f"PO {digits(4)}-{digits(3)}-{digits(3)}",
    )
    negative(
        "date",
        f"on {R.randint(1990, 2030)}-{R.randint(1, 12):02d}-{R.randint(1, 28):02d}",
        f"{R.randint(1, 28):02d}.{R.randint(1, 12):02d}.{R.randint(1990, 2030)} {R.randint(0, 23):02d}:{R.randint(0, 59):02d}",
        f"at {R.randint(1_500_000_000, 1_900_000_000)}",
        f"{R.randint(2000, 2030)}{R.randint(1, 12):02d}{R.randint(1, 28):02d}T{R.randint(0, 23):02d}{R.randint(0, 59):02d}00Z",
        f"{R.randint(1, 12)}/{R.randint(1, 28)}/{R.randint(1990, 2030)}",
    )
    negative(
        "number",
        f"loss {R.random():.12f}",
        f"{R.randint(10**9, 10**12):,} bytes",
        f"lat {R.uniform(-90, 90):.6f}, lon {R.uniform(-180, 180):.6f}",
        f"took {R.uniform(0, 1000):.9f} s",
        f"{R.randint(10**5, 10**7)} rows",
        f"x = {R.randint(10**8, 10**11)}",
    )
    negative(
        "version",
        f"v{R.randint(0, 20)}.{R.randint(0, 30)}.{R.randint(0, 30)}",
        f"version {R.randint(0, 20)}.{R.randint(0, 30)}.{R.randint(0, 30)}.{R.randint(0, 30)}",
        f"pkg-{R.randint(0, 20)}.{R.randint(0, 30)}.{R.randint(0, 30)}.{R.randint(0, 30)}",
        f"pkg=={R.randint(0, 20)}.{R.randint(0, 30)}.{R.randint(0, 30)}.{R.randint(0, 30)}",
    )


def isbn13():
    body = "978" + digits(9)
    return body + str(-sum(int(c) * (3 if i % 2 else 1) for i, c in enumerate(body)) % 10)


for _ in range(12):
    number = isbn13()
    negative(
        "isbn",
        f"ISBN {number}",
        f"ISBN {number[:3]}-{number[3]}-{number[4:6]}-{number[6:12]}-{number[12]}",
        f"isbn-10 0-{digits(3)}-{digits(5)}-X",
    )


# --- tokens, private keys
def b64url(value):
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")


for algorithm in ("HS256", "RS256", "ES256", "none"):
    header = {"alg": algorithm, "typ": "JWT"}
    body = {"sub": digits(10), "name": "Ada", "iat": 1764467303}
    signature = "" if algorithm == "none" else chars(URL64, {"HS256": 43, "RS256": 342, "ES256": 86}[algorithm])
    positive(
        "jwt",
        f"{b64url(header)}.{b64url(body)}.{signature}",
        "Authorization: Bearer {}",
        "cookie: session={}; Path=/",
        "token {}",
    )
positive(
    "jwt",
    f"{b64url({'alg': 'dir', 'enc': 'A256GCM'})}..{chars(URL64, 16)}.{chars(URL64, 80)}.{chars(URL64, 22)}",
    "jwe {}",
)
negative(
    "jwt", "eyJ is how tokens begin", "eyJhbGciOi...", "the header eyJhbGciOiJIUzI1NiJ9 alone", "key.with.dots", "a.b.c"
)
for label in (
    "PRIVATE KEY",
    "RSA PRIVATE KEY",
    "EC PRIVATE KEY",
    "ENCRYPTED PRIVATE KEY",
    "OPENSSH PRIVATE KEY",
    "PGP PRIVATE KEY BLOCK",
    "DSA PRIVATE KEY",
):
    lines = [chars(B62 + "+/", 64) for _ in range(6)] + [chars(B62, 20) + "=="]
    head = (
        "Version: x\n\n"
        if "PGP" in label
        else "Proc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,0123\n\n"
        if label.startswith("RSA")
        else ""
    )
    block = f"-----BEGIN {label}-----\n{head}" + "\n".join(lines) + f"\n-----END {label}-----"
    positive("pem", block, "key:\n{}\nend")
    CASES.append(("pem", f"cut off: {block[: len(block) // 2]}", lines[1]))
    CASES.append(("pem", f"{block[len(block) // 2 :]} is the rest", lines[5]))
    escaped = block.replace("\n", "\\n")
    positive("pem", escaped, '{"private_key": "{}"}')
negative(
    "pem",
    "-----BEGIN PUBLIC KEY-----\nMFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAE\n-----END PUBLIC KEY-----",
    "-----BEGIN CERTIFICATE-----\nMIIBszCCAVmgAwIBAgIUZ\n-----END CERTIFICATE-----",
    "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ host",
    "a private key is needed",
)

# --- passwords
PASSWORDS = [
    "Tr0ub4dor&3",
    "hunter2!",
    "c0rrect-h0rse",
    "S3cr3t#2026",
    "qW9$zz1p",
    "Xy7_pl0k",
    "p@55w0rd!",
    "9f8Gh2kLm",
    "letMeIn2026",
    "Ankara.06!",
    "zażółć7X",
    "MyDogRex99",
]
for value in PASSWORDS:
    positive(
        "password",
        value,
        *R.sample(
            [
                "password: {}",
                "my password is {}",
                "pwd={}",
                "the wifi password is {}",
                "PASSWORD={}",
                '"password": "{}"',
                "passwd: '{}'",
                "şifre: {}",
                "parola {}".replace(" ", ": "),
                "Passwort: {}",
                "mot de passe : {}",
                "contraseña: {}",
                'passphrase = "{}"',
                "the password for the router is {}",
                "DB_PASSWORD={}",
                "pass: {}",
                "--password={}",
                "пароль: {}",
                "root password was {}",
                "password = '{}'",
            ],
            5,
        ),
    )
positive("password", "correct horse battery 7", 'passphrase: "{}"')
positive("password", "letmein", "DB_PASSWORD={}", 'password = "{}"')
for value in ["S3cret", "p4ss:w0rd", "x9!k2", "postgres1", "a@b9c"]:
    positive(
        "urlcred",
        value,
        "postgres://app:{}@db.example.net:5432/app",
        "redis://:{}@cache:6379/0",
        "https://ci:{}@git.example.com/r.git",
        "amqp://u:{}@mq/vh",
        "mongodb+srv://u:{}@c0.abc.mongodb.net/db",
    )
positive(
    "urlcred",
    "S3cret99",
    "curl -u admin:{} https://api.example.com",
    "sshpass -p {} ssh root@h",
    "mysql -u root -p{} app",
)
negative(
    "password",
    "password must be at least 12 characters",
    "the password is required",
    "password: string",
    "password: str",
    "password = getpass.getpass()",
    "password=os.environ['PW']",
    "password: ${DB_PASSWORD}",
    "password: ********",
    "reset your password here",
    "password: <secret>",
    "Password is incorrect",
    "password_hash column",
    "passwords are hashed with bcrypt",
    "def login(user, password):",
    "password=password",
    "password: Optional[str] = None",
    "the password is stored in 1Password",
    "pass: test_login",
    "passed: 12, failed: 0",
    "pass the salt",
    "pass=args.password",
    "postgres://user:password@localhost/db",
    "postgres://localhost:5432/db",
    "http://host:8080/path@x",
    "https://example.com/a:b@c",
    "postgres://${USER}:${PASS}@host/db",
    "https://user@host/x",
    "password policy: 90 days",
    "password is your pet's name",
    "password: changeme",
    "forgot password? click here",
    "PASSWORD_RESET_TIMEOUT=259200",
    "the password was changed",
    "mypassword is weak",
)

# --- code and prose
negative(
    "code",
    "x: dict[str, int] = {}",
    "return a[i::n]",
    "grep -rn 'api_key' src/",
    "for (int i = 0; i < 1000000; i++)",
    "assert len(key) == 32",
    "ENV TOKEN_PATH=/run/secrets/token",
    "Authorization: Bearer $TOKEN",
    'curl -H "Authorization: Bearer ${TOKEN}"',
    "curl -u $USER:$PASS https://x",
    "color: #A1B2C3D4;",
    "import { Token } from './token'",
    "0xDEADBEEFCAFEBABE",
    "UPDATE t SET n = 4111 WHERE id = 1111",
    "rgba(255, 255, 255, 0.5)",
    "margin: 10px 20px 30px 40px",
    "crc32 3610a686",
    "chmod 0644 file",
    "sleep 3600",
    "@override",
    "user@host:~$ ls",
    "http://example.com:8080/path?x=1&y=2",
    "arn:aws:iam::123456789012:role/dev",
    "s3://bucket/2026/11/30/part-00001",
    "docker run -p 8080:80 nginx:1.25.3",
    "pytest tests/test_x.py::TestA::test_b",
    "base64 -d <<< aGVsbG8=",
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJ",
    'ETag: W/"5d8c72a5edda8d6a"',
    "SELECT 1 + 1",
    "kubectl get pods -n kube-system",
    "vec![0u8; 1024]",
)
negative(
    "prose",
    "She prefers short answers and uses uv.",
    "We met on 3 May 2019 in room 1204.",
    "Flight TK 1923 at 06:45, gate 24.",
    "The 2024-2025 season had 38 games.",
    "It costs 1 299,00 TL.",
    "Chapter 3, verses 12-15.",
    "He ran 42.195 km in 2:58:31.",
    "ISO 27001 and RFC 8785 apply.",
    "Use Python 3.11, 3.12 or 3.13.",
    "The API returns 404 or 500.",
    "Password managers are recommended.",
    "Our phone policy changed.",
    "Send an email to the whole team.",
    "My email client is Thunderbird.",
    "IPv6 is enabled.",
    "The card layout has four columns.",
    "IBAN validation uses mod 97.",
    "Her social life is busy.",
    "The key idea is locality.",
    "He is a token male in the team.",
    "The secret ingredient is cumin.",
    "Section 4.2.1 explains it.",
    "Between 10 and 20 people came.",
    "Bus 415 stops at 20:30.",
    "The score was 3-2 after 120 minutes.",
    "MAC addresses such as 00-1B-44-11-3A-B7 are kept.",
    "Room 415-B, floor 12.",
    "Model XR-2000-15 weighs 12.5 kg.",
)

if __name__ == "__main__":
    target = Path(__file__).with_name("pii_generated.json")
    target.write_text(json.dumps(CASES, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")
    print(f"{len(CASES)} cases, {sum(value is None for _, _, value in CASES)} of them look-alikes")
