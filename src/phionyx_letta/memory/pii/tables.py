"""Public registries that the rules consult, as of the sources named."""

from __future__ import annotations

import phonenumbers

_GENERIC = """
com org net edu gov mil int arpa info biz name pro aero coop museum jobs mobi travel tel cat asia post xxx academy
accountant accountants actor adult agency ai amsterdam apartments app archi art associates attorney auction audio
auto band bank bar bargains bayern beer berlin best bet bid bike bio black blog blue boston boutique brussels build
builders business buzz cab cafe camera camp capital car cards care career careers casa cash casino center ceo chat
cheap church city claims cleaning click clinic clothing cloud club coach codes coffee college community company
computer condos construction consulting contact contractors cool country coupons courses credit cricket cruises
dance data date dating day deals degree delivery democrat dental dentist design dev diamonds digital direct
directory discount doctor dog domains download earth eco education email energy engineer engineering enterprises
equipment estate events exchange expert exposed express fail faith family fan fans farm fashion film finance
financial fish fit fitness flights florist flowers foo football forex forsale foundation fun fund furniture futbol
fyi gallery game games garden gay gift gifts gives glass global gmbh gold golf graphics green group guide guitars
guru hamburg haus health healthcare help hiphop hockey holdings holiday homes horse hospital host hosting hotel
house icu inc industries ink institute insure international investments irish istanbul jetzt jewelry kim kitchen
koeln kyoto land law lawyer lease legal lgbt life lighting limited limo link live llc loan loans lol london love ltd
ltda luxury madrid maison management market marketing markets mba media melbourne memorial men menu miami moda moe
mom money monster mortgage moscow movie nagoya navy network new news ngo ninja nyc observer okinawa one ong online
ooo osaka page paris partners parts party pet pharmacy phone photo photography photos physio pics pictures pink
pizza place plumbing plus poker porn press prod productions promo properties property pub quebec racing realty
recipes red rehab reise reisen rent rentals repair report republican rest restaurant review reviews rich rip rocks
rodeo run ruhr saarland sale salon school science scot security services sex sexy shiksha shoes shop shopping show
singles site ski skin soccer social software solar solutions space sport spot srl storage store stream studio study
style sucks supplies supply support surf surgery swiss sydney systems taipei tattoo tax taxi team tech technology
tennis theater theatre tickets tienda tips tires tirol today tokyo tools top tours town toys trade trading training
tube university uno vacations vegas ventures vet viajes video villas vin vip vision vlaanderen vodka vote voting
voyage wales wang watch webcam website wedding whoswho wien wiki win wine work works world wtf xyz yachts yoga
yokohama youtube zip zone abogado africa baby beauty bible boats bond book capetown catholic charity christmas cymru
dad desi diy durban eat esq eus forum gal gdn hosting hotels joburg kids kiwi lat lotto luxe meet meme moto music nexus nrw
phd play prof quest realestate rsvp tour trust voto watches weather wed zuerich localdomain
google amazon apple microsoft example test invalid
"""
#: Top-level domains of more than two letters that mail is seen under (IANA root zone, the commoner part), and RFC 2606.
GENERIC_TLDS = frozenset(_GENERIC.split())
#: Top-level domains of countries (ISO 3166, and those that differ from it).
COUNTRY_TLDS = frozenset(code.lower() for code in phonenumbers.SUPPORTED_REGIONS) | {
    "uk",
    "eu",
    "su",
    "aq",
    "bv",
    "gs",
    "tf",
}
_COMMON = """
com org net edu gov io co dev app ai info biz eu uk de fr tr es it nl be ch at pl se no dk fi cz gr pt ru ua jp cn
kr br mx ca au nz za
"""
#: The domains that an address spelt out in words is believed to end in; words of English such as "in" are left out.
COMMON_TLDS = frozenset(_COMMON.split())

_IBANS = """
AD:24 AE:23 AL:28 AT:20 AZ:28 BA:20 BE:16 BG:22 BH:22 BI:27 BR:29 BY:28 CH:21 CR:22 CY:28 CZ:24 DE:22 DJ:27 DK:18
DO:28 EE:20 EG:29 ES:24 FI:18 FK:18 FO:18 FR:27 GB:22 GE:22 GI:23 GL:18 GR:27 GT:28 HN:28 HR:21 HU:28 IE:22 IL:23
IQ:23 IS:26 IT:27 JO:30 KW:30 KZ:20 LB:28 LC:32 LI:21 LT:20 LU:20 LV:21 LY:25 MC:27 MD:24 ME:22 MK:19 MN:20 MR:27
MT:31 MU:30 NI:28 NL:18 NO:15 OM:23 PK:24 PL:28 PS:29 PT:25 QA:29 RO:24 RS:22 RU:33 SA:24 SC:31 SD:18 SE:24 SI:19
SK:24 SM:27 SO:23 ST:25 SV:28 TL:23 TN:24 TR:26 UA:29 VA:22 VG:24 XK:20 YE:30
"""
#: Length of an IBAN by country, ISO 13616 (SWIFT, "IBAN Registry").
IBAN_LENGTHS = {entry[:2]: int(entry[3:]) for entry in _IBANS.split()}

#: Issuers of payment cards, ISO/IEC 7812: first and last number of a range, and the lengths of its cards.
ISSUERS: tuple[tuple[str, str, tuple[int, ...]], ...] = (
    ("4", "4", (13, 16, 19)),
    ("51", "55", (16,)),
    ("2221", "2720", (16,)),
    ("34", "34", (15,)),
    ("37", "37", (15,)),
    ("6011", "6011", (16, 19)),
    ("644", "649", (16, 19)),
    ("65", "65", (16, 19)),
    ("622", "622", (16, 17, 18, 19)),
    ("62", "62", (16, 17, 18, 19)),
    ("3528", "3589", (16, 17, 18, 19)),
    ("300", "305", (14, 16)),
    ("3095", "3095", (14, 16)),
    ("36", "36", (14, 16)),
    ("38", "39", (14, 16)),
    ("5018", "5018", (12, 13, 14, 15, 16, 17, 18, 19)),
    ("5020", "5020", (12, 13, 14, 15, 16, 17, 18, 19)),
    ("5038", "5038", (12, 13, 14, 15, 16, 17, 18, 19)),
    ("5893", "5893", (12, 13, 14, 15, 16, 17, 18, 19)),
    ("6304", "6304", (12, 13, 14, 15, 16, 17, 18, 19)),
    ("6759", "6763", (12, 13, 14, 15, 16, 17, 18, 19)),
    ("2200", "2204", (16, 17, 18, 19)),
    ("9792", "9792", (16,)),
    ("60", "60", (16,)),
    ("81", "82", (16,)),
    ("506", "506", (16, 18, 19)),
    ("508", "509", (16,)),
    ("5019", "5019", (16,)),
    ("6363", "6363", (16,)),
)
