"""Advice that no child should get, found clause by clause. Standard library only.

A danger counts where a clause names it and forbids nothing: "never look at the Sun" is fine, "don't worry, look at
the Sun" is not. The patterns stop some harmless sentences too; reword those, in a dataset that is cheap. They are
no filter for what strangers write.
"""

import re
from collections.abc import Iterator

CLAUSE_END = re.compile(r"[.,;:?!()]+|[、。，；：？！（）「」“”]+|(?<!nothing)(?<!anything) but |\bbecause\b")
NEGATION = re.compile(
    r"\b(?:never|not|no|nobody|nothing|avoid|stop|without|don't|doesn't|can't|cannot|mustn't|shouldn't|isn't)\b"
    r"|ない|ません|だめ|いけ|やめ|禁止|不|别|勿|禁",
    re.IGNORECASE,
)
# Words that comfort or invite instead of forbidding: "don't be afraid to look" and "why not look" are advice.
COMFORT = re.compile(
    r"\b(?:don't|do not|no need to) (?:worry|be (?:afraid|scared|shy))|\bno (?:problem|harm|danger|worries|matter)\b"
    r"|\bwhy (?:not|don't (?:you|we))\b|\b(?:won't|doesn't|can't|not) hurt\b"
    r"|\b(?:not|isn't|won't be|never) (?:dangerous|bad|hurt|harmful|scary)"
    r"|(?:こわ|怖|あぶな|危な)くない|(?:危険では|心配は?(?:いら|し))ない|(?:ない|ません)か|てみ(?:ない|ません)"
    r"|不(?:用|要|必)?(?:怕|担心)|不(?:会有)?危险|不要紧|不错|(.)不\1",
    re.IGNORECASE,
)
# Where an order or a suggestion begins; "caterpillars eat leaves" is neither.
DO = (
    r"(?:^(?:(?:so|then|now|next|first|also|just|gently|carefully|please|try to)\s+)*"
    r"|\b(?:try|you can|you could|you may|you should|can you|could you|let's|please|now|just|ask)\b[^.?!]{0,25}?"
    r"|\b(?:and|or|to|then)\s+(?:then |gently |carefully )?)\b"
)
DANGERS = {
    danger: re.compile("|".join(patterns), re.IGNORECASE)
    for danger, patterns in {
        "looking at the Sun": (
            r"\b(?:look|star[ei]|gaz[ei]|peek|glanc[ei]|squint)(?:ng|ing)?\b[^.?!]{0,15}\b(?:at|into|towards?)\b[^.?!]{0,12}"
            r"\b(?:sun(?:set|rise)?|eclipse)\b",
            r"\b(?:watch|observe|view|see)(?:ing)?\b[^.?!]{0,10}\bthe (?:sun(?:set|rise)?|eclipse)\b",
            r"\b(?:telescope|binoculars|magnifying glass|lens)\b.{0,30}\bsun\b",
            r"(?:太陽|たいよう|お日さま|日食)(?:を|の方を)?.{0,8}(?:見て|見よう|見る|見上げ|ながめ|のぞ)",
            r"(?:看|望|盯)(?:着|向|一看|一下)?(?:太阳|日食)|直视太阳|望远镜.{0,8}太阳",
        ),
        "tasting": (
            DO + r"(?:taste|lick|eat|drink|swallow|sip|nibble|chew|bite)\b|\bin(?:to|side)? your mouth\b",
            r"なめて|なめよう|味見|(?:食べ|たべ|なめ)てみ|(?:飲|の)んでみ|口に入れ",
            r"尝|舔|(?:吃|喝)一?(?:口|下)|放进嘴",
        ),
        "mains power": (
            r"\b(?:put|poke|stick|push|touch|open|use|test|connect|screw)\b[^.?!]{0,30}"
            r"\b(?:sockets?|outlets?|mains|power point|fuse box)\b",
            r"\bplug (?:it|the|your|this|a lamp)\b",
            r"\b(?:open|cut|repair|tape|touch)\b[^.?!]{0,20}\b(?:cable|cord|light fitting)\b",
            r"コンセントに.{0,12}(?:さ|入れ|つな)|(?:コンセント|電線)を?.{0,3}(?:さわ|ぬ|分解)",
            r"(?:插|放|伸|塞)(?:进|入|到).{0,4}插座|(?:摸|碰|拆|修|用).{0,4}(?:插座|电源)|拆开电",
        ),
        "fire and heat": (
            r"\b(?:candle|match(?:es|stick)|bonfire|campfire|flame|stove|hot plate)\b",
            r"\b(?:a|the|your) lighter\b(?! \w)",
            DO + r"(?:burn|boil|ignite|set fire|light a)\b",
            DO + r"(?:use|heat|turn on|switch on)[^.?!]{0,12}\b(?:oven|iron|cooker)\b",
            r"火をつけ|ろうそく|マッチ|ライター|コンロ|(?:沸|わ)かし|(?:燃|も)やし",
            r"点火|点燃|点着|蜡烛|火柴|打火机|炉子|烧(?:水|一)",
        ),
        "chemicals": (
            r"\b(?:mix|pour|add|smell|sniff|open|try)\b[^.?!]{0,25}"
            r"\b(?:bleach|ammonia|acid|cleaners?|detergent|medicines?|pills?|chemicals?|petrol|batter(?:y|ies) up)\b",
            r"(?:洗剤|漂白剤|薬品?).{0,8}(?:まぜ|混ぜ|入れ|かい|飲)",
            r"(?:漂白|清洁剂|药|洗衣液).{0,8}(?:混|倒|加|闻|试)|(?:混|倒|加|闻).{0,6}(?:漂白|清洁剂|药|洗衣液)",
        ),
        "climbing": (
            r"\b(?:climb|stand)\b(?! down)[^.?!]{0,20}"
            r"\b(?:trees?|roof|ladder|wall|cliff|chair|table|shelf|fence|rocks?)\b",
            r"(?:木|屋根|はしご|へい|がけ|いす).{0,4}(?:登|のぼ)",
            r"爬(?:上|到|树|墙|屋顶|梯子)|站(?:到|在)(?:椅子|桌子|窗台)",
        ),
        "storms, ice and water": (
            r"\b(?:stay|stand|hide|wait|shelter|play)\b[^.?!]{0,20}\b(?:under|beneath|near)\b[^.?!]{0,10}\btrees?\b",
            r"\b(?:walk|step|skate|play|run)\b[^.?!]{0,15}\bon (?:the |a )?(?:ice|frozen)",
            r"\b(?:swim|dive|wade)\b[^.?!]{0,12}\balone\b",
            r"木の下(?:で|に).{0,6}(?:待|かくれ|雨やどり)|氷の上を",
            r"在?大?树下(?:面)?(?:躲|等|避)|走(?:到|上)冰面|(?:独自|一个人).{0,4}(?:游泳|下水)",
        ),
        "handling animals": (
            DO + r"(?:touch|catch|grab|hold|pick up|poke)\b[^.?!]{0,20}"
            r"\b(?:bees?|spiders?|snakes?|wasps?|bats?|nest)\b",
            r"(?:クモ|ハチ|ヘビ|きのこ).{0,4}(?:さわっ|つかま|とって)|(?:摸|抓|捉)(?:一下)?(?:蜜蜂|蜘蛛|蛇|蘑菇)",
        ),
    }.items()
}


def unsafe(text: str) -> Iterator[tuple[str, str]]:
    """Every (clause, danger) of a text that advises or shows something dangerous."""
    for clause in map(str.strip, CLAUSE_END.split(text)):
        if NEGATION.search(COMFORT.sub(" ", clause)):
            continue
        yield from ((clause, danger) for danger, pattern in DANGERS.items() if pattern.search(clause))
