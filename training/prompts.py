"""User turns written for the training data: templates filled with topics, texts and code."""

from __future__ import annotations

import random

TOPICS = (
    """
the water cycle|compound interest|sourdough bread|the French Revolution|black holes|photosynthesis
chess openings|electric cars|the human heart|remote work|volcanoes|jazz music|the Roman Empire
vaccines|houseplants|time management|the stock market|bees|solar panels|ancient Egypt|knitting
the immune system|meditation|earthquakes|public speaking|the Great Barrier Reef|bicycles|tea
inflation|plate tectonics|coffee roasting|the printing press|dolphins|recycling|the Cold War
mountain climbing|job interviews|the Moon landing|sleep|gravity|hospital nursing|the Silk Road
origami|rainforests|credit cards|the Olympic Games|watercolour painting|DNA|trains|glaciers
learning a language|the Industrial Revolution|tomatoes|running a marathon|penguins|antibiotics
board games|hurricanes|the piano|healthy breakfasts|castles|owning a dog|the internet|lighthouses
machine learning|poetry|urban gardens|the night sky|wool|whales|democracy|bridges|cheese|first aid
robots|deserts|budgeting|Shakespeare|wind power|friendship|river pollution|maps|fireworks|opera
mushrooms|passwords|the metric system|camping|allergies|beekeeping|spreadsheets|moving house
thunder|pottery|the Renaissance|car insurance|migration of birds|batteries|crosswords|snow
a first job|sharing a flat|the tides|soap|video games|a vegetable soup|jet lag|museums|orchestras
optical illusions|rice farming|umbrellas|subtitles|a job abroad|sharks|yoga|bread and butter
house cats|the printing of banknotes|ice skating|mirrors|fractions|probability|a broken laptop
""".replace("\n", "|")
    .strip("|")
    .split("|")
)

PEOPLE = (
    """
a curious child|a retired sailor|a young teacher|a tired nurse|two brothers|an old clockmaker
a lonely robot|a village baker|a shy painter|a lost hiker|a night guard|a stubborn farmer
a travelling musician|a new student|a forgetful wizard|a deep-sea diver|a taxi driver
a grandmother and her cat|a small dragon|the last librarian|a chess champion|a ship's cook
a postman|twin sisters|a talking crow|a nervous bride|a retired spy|the king's tailor|a sculptor
an inventor of useless machines|a boy with one shoe|a beekeeper|a judge|an exhausted waiter
""".replace("\n", "|")
    .strip("|")
    .split("|")
)

PLACES = (
    """
in a quiet mountain village|on a space station|by the sea|in an abandoned factory
on a long train ride|in a crowded market|in the desert|at the bottom of a lake|in a small bookshop
during a heavy storm|in a city without electricity|at the edge of a forest|on a frozen island
in a school at night|on a ferry|in a greenhouse|at a railway station|in a theatre before the show
in a hospital corridor|on a rooftop|in a museum after closing time|in a caravan|at a bus stop
""".replace("\n", "|")
    .strip("|")
    .split("|")
)

TEXTS = [
    "The meeting has been moved to Thursday at three because the large room is being painted. "
    "Please bring the figures for the second quarter and tell Anna if you cannot come.",
    "Our bakery opened in 1987 with two ovens and one delivery van. Today forty people work "
    "here, and we still shape every loaf by hand before sunrise.",
    "i recieved the package yesterday but one of the cup was broke and nobody answer my emails "
    "since then, its very disapointing",
    "The old bridge was closed in March after engineers found cracks in two of its pillars. "
    "Repairs are expected to cost four million dollars and to last until the end of next year.",
    "Heat the oil in a pan, add the onions and cook them until they are soft. Stir in the rice, "
    "pour over the stock and let it simmer for eighteen minutes. Serve with lemon.",
    "me and my freind was going to the libary when it start to rain so we run all the way home "
    "and forgot the books on a bench",
    "Whales sing to find one another across hundreds of kilometres of ocean. Their songs change "
    "slowly from year to year, and a new phrase may travel across the Pacific.",
    "The new phone has a brighter screen and a better camera than last year's model, but its "
    "battery lasts two hours less and the price went up by ninety dollars.",
    "Dear Mr Patel, thank you for your application for the post of laboratory assistant. We "
    "would like to invite you to an interview on 14 May at 10:30 in our office in Leeds.",
    "Rivers carry sand and mud from the mountains to the sea. Where the water slows down the "
    "load sinks to the bottom, and after thousands of years a delta has grown.",
    "Maria studied physics in Lisbon, worked for six years at an observatory in Chile and now "
    "teaches at a secondary school in Porto, where she runs the astronomy club.",
    "The committee will make a decision about the proposal in order to determine whether or not "
    "it is the case that the budget is sufficient for the purposes of the project.",
    "Unfortunately the museum is closed on Mondays. Tickets cost 12 euros for adults and 5 "
    "euros for children; on the first Sunday of the month everybody enters for free.",
    "She opened the letter slowly. The paper smelled of smoke, and the handwriting was her "
    "father's, although he had been dead for eleven years.",
    "Sales rose by 8 percent in spring, fell by 3 percent in summer and rose again by 5 percent "
    "in autumn. The board expects a calm winter and plans to open two more shops.",
    "The experiment were repeated three times. In each case the plants that got more light "
    "grows faster, but they also needs more water then the others.",
    "Turn off the main switch before you open the case. Remove the four screws on the back, "
    "lift the cover and replace the fuse by one of the same type.",
    "hey can you cover my shift on friday, i got a dentist appointment and totaly forgot about it, "
    "i will take yours on sunday if thats ok",
    "Lot 14 is an oak table from about 1890, two metres long, with one drawer and a few scratches. "
    "The starting price is 350 pounds, and it can be seen on Wednesday afternoon.",
    "The patient slept well. Her temperature was 37.4 at six and 36.9 at noon; she ate half of "
    "her breakfast and walked to the window and back with some help.",
    "When the snow melted we found the gate lying in the ditch. Nobody knew who had taken it off "
    "its hinges, but the sheep were gone, and so was the neighbours' tractor.",
    "Fans of the first film will be disappointed. The jokes are old, the hero has become dull, and "
    "only the music, written by a student from Oslo, is worth the ticket.",
    "Line 4 does not run between the harbour and the university until 3 June. Buses leave from "
    "the square every twelve minutes; please allow half an hour more.",
    "We was told that the order will arrives in two weeks, but five week later there are still "
    "nothing, and the customer service dont even have answered.",
    "Iron rusts when water and oxygen reach its surface. Paint keeps both away, and a coat of "
    "zinc protects the metal even where it has been scratched.",
    "My name is Oleksiy, I am twelve, and I collect stones. The best one has a leaf inside that "
    "is older than all people. My sister says it is only a print, but I like it.",
    "Revenue was 4.2 million in 2021, 5.1 million in 2022 and 4.9 million in 2023. Two of the "
    "seven branches made a loss; the one in Graz earned more than all others together.",
    "The garden is divided into three parts: roses near the house, vegetables behind the hedge, "
    "and at the far end a meadow that is cut only once a year, in August.",
    "it was a realy good concert, the singer have a amazing voice and her band to, but the sound "
    "was to loud and you could not here the words",
    "A good night's sleep helps the brain to store what was learned during the day. People who "
    "sleep less than six hours make more mistakes and remember less.",
]

CODE = [
    "def mean(xs):\n    total = 0\n    for x in xs:\n        total += x\n"
    "    return total / len(xs)",
    "def find(items, wanted):\n    for i in range(len(items)):\n        if items[i] == wanted:\n"
    "            return i\n    return -1",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"
    "        self.items.append(item)\n\n    def pop(self):\n        return self.items.pop()",
    "for (let i = 0; i < users.length; i++) {\n  if (users[i].active) {\n"
    "    console.log(users[i].name);\n  }\n}",
    "def fib(n):\n    if n < 2:\n        return n\n    return fib(n - 1) + fib(n - 2)",
    "SELECT name, price FROM products WHERE price > 20 ORDER BY price DESC;",
    "int max(int a, int b) {\n    if (a > b)\n        return a;\n    else\n        return b;\n}",
    "with open('data.txt') as f:\n    lines = f.readlines()\nwords = []\nfor line in lines:\n"
    "    for word in line.split(' '):\n        words.append(word.lower())",
    "def area(shape, a, b):\n    if shape == 'square':\n        return a * a\n"
    "    if shape == 'rectangle':\n        return a * b\n    if shape == 'triangle':\n"
    "        return a * b / 2",
    "def is_palindrome(text):\n    text = text.lower()\n    return text == text[::-1]",
    "import random\n\nsecret = random.randint(1, 10)\nguess = None\nwhile guess != secret:\n"
    "    guess = int(input('Guess: '))\nprint('Right!')",
    "function debounce(fn, ms) {\n  let timer;\n  return (...args) => {\n    clearTimeout(timer);\n"
    "    timer = setTimeout(() => fn(...args), ms);\n  };\n}",
    "UPDATE employees SET salary = salary * 1.05 WHERE department = 'sales';",
    "def load(path):\n    try:\n        return json.load(open(path))\n"
    "    except:\n        return {}",
    "public static int sum(int[] values) {\n    int sum = 0;\n"
    "    for (int i = 0; i <= values.length; i++) {\n        sum += values[i];\n    }\n"
    "    return sum;\n}",
    "for f in *.txt; do\n  wc -l $f\ndone | sort -n",
    "words = {}\nfor w in text.split():\n    if w in words:\n        words[w] = words[w] + 1\n"
    "    else:\n        words[w] = 1",
    "class Node:\n    def __init__(self, value, next=None):\n        self.value = value\n"
    "        self.next = next\n\ndef length(node):\n    return 0 if node is None else 1 + "
    "length(node.next)",
    "const total = cart.map(item => item.price * item.count).reduce((a, b) => a + b, 0);",
]

TASKS = (
    """
reverses a string|checks whether a number is prime|counts the words in a text
sorts a list of numbers|merges two dictionaries|finds the largest value in a list
removes duplicates from a list|converts Celsius to Fahrenheit|reads a CSV file and sums a column
computes a factorial|checks whether two words are anagrams|flattens a nested list
validates an email address|generates a random password|finds the shortest word in a sentence
transposes a matrix|counts vowels|computes the greatest common divisor|draws a triangle of stars
rolls two dice|downloads a web page|parses a date|inverts a binary tree|does a binary search
implements a queue|multiplies two matrices|rounds prices to five cents|splits a bill
finds all links in a page|counts the days between two dates|shuffles a deck of cards
checks whether brackets are balanced|prints the first n square numbers|sorts people by age
converts a number to Roman numerals|finds missing numbers in a list|groups words by their length
resizes an image|plays tic-tac-toe|simulates a traffic light|logs errors to a file
writes a list to a JSON file|computes a running average|stores contacts in a database
""".replace("\n", "|")
    .strip("|")
    .split("|")
)

QUESTIONS = [
    "What is {topic}?",
    "Explain {topic} to a ten-year-old.",
    "Why does {topic} matter?",
    "What are the main advantages and disadvantages of {topic}?",
    "Give me a short history of {topic}.",
    "How would you teach somebody about {topic}?",
    "What are common misconceptions about {topic}?",
    "How is {topic} connected to {other}?",
    "Compare {topic} with {other}.",
    "I know nothing about {topic}. Where should I begin?",
    "What should everyone know about {topic}? Answer in three sentences.",
    "Is it worth spending time on {topic}? Give reasons for and against.",
    "Describe {topic} step by step.",
    "Hi! Can you tell me something surprising about {topic}?",
    "A friend asked me about {topic} and I had no answer. Help!",
    "What mistakes do people make when they first deal with {topic}?",
    "Can {topic} be dangerous?",
    "How much does {topic} have to do with money?",
    "What would the world be like without {topic}?",
    "Which is older, {topic} or {other}, and how do we know?",
    "Is it true that {topic} was invented {place}?",
    "Who decides about {topic}, and who should?",
]
LISTS = [
    "List five facts about {topic}.",
    "Give me ten words related to {topic}.",
    "Write a numbered list of steps to get started with {topic}.",
    "Make a table with three columns about {topic} and {other}.",
    "Suggest four titles for an article about {topic}.",
    "Write a quiz of five questions on {topic}.",
    "Name three books or films about {topic} and say why they are good.",
    "Make a plan for a week of learning about {topic}.",
    "Which tools do I need for {topic}? Use bullet points.",
    "Write a JSON object that describes {topic} with the keys name, kind and uses.",
]
STORIES = [
    "Write a short story about {person} {place}.",
    "Tell me a funny story about {person} and {topic}.",
    "Write a poem about {topic}.",
    "Begin a mystery novel with {person} {place}.",
    "Write a dialogue between {person} and {person2} about {topic}.",
    "Write a letter from {person} to a friend, sent from a journey {place}.",
    "Describe a morning {place}.",
    "Write a fairy tale in which {person} learns about {topic}.",
    "Write a speech that {person} gives about {topic}.",
    "Write a product description for a book about {topic}.",
    "Write a blog post about {topic}.",
    "Write an email asking a colleague for help with {topic}.",
    "{person} wakes up {place} and remembers nothing. Go on.",
    "Write the last page of a novel about {person}.",
    "Write a song with a chorus about {topic}.",
    "Write a short play with {person}, {person2} and {topic}.",
    "Describe {person} to somebody who will never meet them.",
    "Write an advertisement for {topic} that makes people smile.",
    "Two strangers meet {place}. Write what they say.",
]
EDITS = [
    "Correct the spelling and grammar of this text:\n\n{text}",
    "Rewrite this text in a friendlier tone:\n\n{text}",
    "Make this shorter:\n\n{text}",
    "Rewrite the following in the past tense:\n\n{text}",
    "{text}\n\nRewrite this more formally.",
    "Repeat the following text exactly, but replace every number by a word:\n\n{text}",
    "Turn this text into bullet points:\n\n{text}",
    "Simplify the language of this text:\n\n{text}",
    "Rewrite this so that it is spoken by {person}:\n\n{text}",
    "Add one more sentence to this text and give me the whole:\n\n{text}",
    "Paraphrase this paragraph:\n\n{text}",
    "Put this text into one single sentence:\n\n{text}",
    "Translate this text into French:\n\n{text}",
    "Translate into Spanish:\n\n{text}",
    "Proofread this. Show the corrected version only.\n\n{text}",
    "Make this sound more exciting: {text}",
    "Write this as if it were a newspaper report: {text}",
    "Expand this into two paragraphs:\n\n{text}",
    "Swap the order of the sentences so that the last comes first:\n\n{text}",
    "Remove every adjective from this text:\n\n{text}",
]
READINGS = [
    "Summarize this text in one sentence:\n\n{text}",
    "{text}\n\nWhat is the main point of this?",
    "Extract all names, places and numbers from this text:\n\n{text}",
    "Read this and write three questions about it:\n\n{text}",
    "What happens next? Continue the text:\n\n{text}",
    "Give this text a title:\n\n{text}",
    "{text}\n\nWho would write this, and to whom?",
    "Classify the mood of this text:\n\n{text}",
    "Text: {text}\n\nQuestion: what is it about? Answer in detail.",
]
PROGRAMS = [
    "Write a Python function that {task}.",
    "Write a JavaScript function that {task}.",
    "Write a C function that {task}, with comments.",
    "How do I write code that {task}?",
    "Write a Python class with a method that {task}. Add a docstring and an example.",
    "Write unit tests for a function that {task}.",
    "Explain this code:\n\n```\n{code}\n```",
    "Add type hints and a docstring:\n\n```\n{code}\n```",
    "Is there a bug in this code?\n\n{code}",
    "Rename the variables in this code to better ones:\n\n```\n{code}\n```",
    "Rewrite this in another programming language:\n\n```\n{code}\n```",
    "Write a shell command that {task}.",
    "Write pseudocode for a program that {task}.",
    "Make this code faster or say why it is fast enough:\n\n```\n{code}\n```",
    "Add error handling to this:\n\n```\n{code}\n```",
    "I am new to programming. What does this do?\n\n{code}",
    "Write a command-line tool in Python that {task}. Show how to call it.",
    "Write a Java method that {task} and a main method that tries it.",
]

KINDS = (QUESTIONS, LISTS, STORIES, EDITS, READINGS, PROGRAMS)


def write_prompt(rng: random.Random) -> str:
    """One user turn: a kind, then one of its templates, filled at random."""
    return rng.choice(rng.choice(KINDS)).format(
        topic=rng.choice(TOPICS),
        other=rng.choice(TOPICS),
        person=rng.choice(PEOPLE),
        person2=rng.choice(PEOPLE),
        place=rng.choice(PLACES),
        text=rng.choice(TEXTS),
        code=rng.choice(CODE),
        task=rng.choice(TASKS),
    )
